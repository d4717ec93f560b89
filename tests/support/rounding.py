"""How near two programs are that compute the same number: equal, as users compile them."""

import os

AS_USERS_COMPILE = bool(os.environ.get("AS_USERS_COMPILE"))
ROUNDING = 0.0 if AS_USERS_COMPILE else 1e-14  # relative
