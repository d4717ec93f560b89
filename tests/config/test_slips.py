"""The obvious slips in one's own code: each is one clear line that says what to do."""

import sys
import textwrap

import pytest

import nca_trader as nca
from nca_trader.config import LearnerConfig, PolicyConfig
from nca_trader.config.extensions import FORGET
from nca_trader.errors import ConfigError

BARS = nca.sample_bars("sp500")[:200]
CODE = """
    import flax.nnx as nnx
    import jax.numpy as jnp
    import numpy as np

    import nca_trader as nca
    from nca_trader.data.features import Feature, make_feature
    from nca_trader.envs.rewards import Below, SharpeMemory


    class Plain:
        pass


    plain = Plain()


    def none(*values, **named):
        pass


    def raises(*values, **named):
        raise ValueError("boom\\nbam")


    def one(step):
        return 1.0


    # rewards
    def pay(config, spec, step):
        return step.log_return if step.kept is None else step.log_return - step.kept[0]


    def paying(scale=1.0):
        return nca.Reward(pay)


    class Paid:
        def __call__(self, config, spec, step):
            return step.log_return


    def wide(config, spec, step):
        return step.after


    def three(a=1, b=2, c=3):
        return pay


    bad = nca.Reward(pay, Plain)


    class Deep(Below):
        pass


    class Elsewhere(Below):
        def after(self, spec, log_return):
            return Below(self.depth)


    class Shallow(Below):
        @classmethod
        def begin(cls, spec, zero):
            return cls(0.0)


    class Silent(Below):
        def shown(self, spec):
            pass


    class Unbegun(Below):
        begin = none


    deep, elsewhere, shallow, silent, unbegun = (
        nca.Reward(pay, memory) for memory in (Deep, Elsewhere, Shallow, Silent, Unbegun)
    )


    # actions
    def scheme(target=lambda spec, action, ordered: 0.0 * ordered, choices=3):
        return nca.ActionScheme(target, choices)


    few, empty, failing = scheme(lambda spec, action: action), scheme(none), scheme(raises)
    scalar = scheme(lambda spec, action, ordered: 0.0 * ordered.sum())


    # features
    def feature(update=lambda mean, bar, count: (mean, bar.close)):
        return make_feature(lambda: np.ones(()), update, warmup=2, span=3)


    made = feature()


    def needy(period):
        return made


    def shrinking():
        return Feature(lambda: np.ones(2), lambda s, bar: (s[:1], bar.close), 0)


    def integer():
        return Feature(lambda: np.ones(()), lambda s, bar: (s, jnp.int32(1)), 0)


    def two_parts():
        return feature(lambda mean, bar: (mean, bar.close))


    def empty_update():
        return feature(none)


    def failing_update():
        return feature(raises)


    def three_values():
        return feature(lambda mean, bar, count: (mean, bar.close * jnp.ones(3)))


    # markets
    def market(num_bars, seed, drift=0.0):
        return nca.synthetic.make("sine", num_bars=num_bars, seed=seed)


    def marketing(drift=0.0):
        return market


    def shorter(num_bars, seed):
        return market(num_bars - 1, seed)


    # costs
    def costing(scale=1.0):
        return lambda trade: 0.001


    def seven(trade):
        return jnp.ones(7)


    # advantages
    def ratio(r_t, discount_t, v_tm1, v_t, lambda_t):
        return r_t + discount_t * v_t - v_tm1


    def estimating(scale=1.0):
        return ratio


    def total(r_t, discount_t, v_tm1, v_t, lambda_t):
        return r_t.sum()


    # policies
    class Net(nnx.Module):
        def __init__(self, spec, config, rngs):
            self.layer = nnx.Linear(spec.num_features, config.channels, rngs=rngs)

        @staticmethod
        def receptive_field(config):
            return 1

        def __call__(self, x, present):
            return self.layer(x)


    def netting():
        return Net


    def net(name, **members):
        globals()[name] = type(name, (Net,), {"__module__": __name__} | members)


    def stream(self, state, x, present):
        return state, x


    class Head(nnx.Module):
        def __init__(self, spec, channels, hidden, rngs):
            pass

        def __call__(self, cells, features):
            return cells, features


    begin = staticmethod(lambda spec, config: jnp.zeros(()))
    net("Few", __call__=lambda self, x: x)
    net("Empty", __call__=lambda self, x, present: None)
    net("Wide", __call__=lambda self, x, present: x)
    net("Failing", __call__=lambda self, x, present: raises())
    net("Unbuilt", __init__=lambda self, spec: raises())
    net("Asking", __init__=lambda self, size: None)
    net("Dropping", __init__=lambda self, rngs: setattr(self, "d", nnx.Dropout(0.1, rngs=rngs)))
    net("Fieldless", receptive_field=staticmethod(none))
    net("FewField", receptive_field=staticmethod(lambda: 1))
    net("Streamed", begin=begin, stream=stream)
    net("NoStream", begin=begin, stream=none)
    net("FewBegin", begin=staticmethod(lambda: 1), stream=stream)
    net("Headed", HEAD=Head)
    net("PlainHead", HEAD=Plain)
"""


def env(**fields):
    return nca.TradingEnv(BARS, nca.EnvConfig(**{"features": ("return_1",)} | fields))


def market(name):
    return nca.TradingEnv(None, nca.EnvConfig(features=("return_1",), market=name, market_bars=100))


def policy(name):
    agent = nca.AgentConfig(policy=PolicyConfig(kind=name, channels=4))
    return nca.make_policy(agent, env().spec)


def advantages(name):
    shape = {"num_segments": 4, "num_minibatches": 1, "segment_length": 16, "logical_shards": 1}
    learner = LearnerConfig(advantages=name, **shape)
    agent = nca.AgentConfig(policy=PolicyConfig(kind="mlp", window=2), learner=learner)
    return nca.make_learner(env(), nca.make_policy(agent, env().spec), agent)


KINDS = {
    "reward": lambda name: env(reward=name),
    "actions": lambda name: env(actions=name),
    "feature": lambda name: env(features=(name,)),
    "sessions": lambda name: env(features=("1d:return_1",), sessions=name),
    "cost": lambda name: env(costs=nca.Costs(own=(name,))),
    "market": market,
    "policy": policy,
    "advantages": advantages,
}
CALL = r"if it returns one, name its call, as in mine:make\(\)\.\Z"
COUNT, BOOM = "TypeError.*argument.*let it take them", r"ValueError at slips.py line .*boom bam"
GOOD = {
    "reward": ("pay", "paying()", "paying(scale=2.0)", "three()", "Paid()", "deep"),
    "actions": ("scheme()",),
    "feature": ("feature", "feature()", "made"),
    "cost": ("costing()",),
    "market": ("market", "market(drift=1.0)"),
    "policy": ("Net", "netting()"),
    "advantages": ("ratio", "estimating()"),
}
SLIPS = {
    "reward": {
        "paying": CALL, "three": "returns a function.*" + CALL, "Paid": CALL, "one": COUNT,
        "plain": "is a Plain of slips; give a function", "none": "returns a NoneType; return one",
        "wide": r"returns float32\(2,\); return one number", "raises": BOOM,
        "elsewhere": r"Elsewhere.after: returns Below\(.*; return Elsewhere\(depth=float32\(\)\)",
        "shallow": r"Shallow.begin: returns Shallow\(depth=the number 0.0\); return",
        "silent": r"Silent.shown: returns a NoneType; return \(float32\(\),\)",
        "unbegun": r"Unbegun.begin: returns a NoneType; return Unbegun\(depth=float32",
        "bad": "its memory has no _fields, begin, after, shown",
    },
    "actions": {
        "scheme": CALL, "pay": CALL, "Plain": CALL, "plain": "is a Plain.*; give an ActionScheme",
        "few": COUNT, "empty": "returns a NoneType; return one weight per asset",
        "scalar": r"returns float32\(\); return one weight per asset", "failing": BOOM,
    },
    "feature": {
        "needy": COUNT, "two_parts": COUNT, "none": "is a NoneType; give a Feature", "raises": BOOM,
        "Plain": "is a Plain of slips; give a Feature", "failing_update": BOOM,
        "empty_update": "cannot unpack", "three_values": "return one float64 number per bar",
        "shrinking": "a bar changes the structure, a shape or a type", "integer": "value is int32",
    },
    "sessions": {
        "none": "is a NoneType; give nca.Sessions", "plain": "is a Plain of slips; give nca.Ses",
        "one": COUNT, "raises": BOOM,
    },
    "cost": {
        "costing": CALL, "Plain": CALL, "plain": "is a Plain.*; give a function", "pay": COUNT,
        "none": "returns a NoneType; return one", "seven": r"returns float32\(7,\); return one",
        "raises": BOOM,
    },
    "market": {
        "marketing": COUNT, "Plain": COUNT, "plain": "is a Plain.*; give a function", "one": COUNT,
        "none": "returned a NoneType; give a function", "shorter": "are of shapes.*return",
        "raises": BOOM,
    },
    "policy": {
        "netting": CALL, "Plain": "give the class of a Flax nnx module.$", "Few": COUNT,
        "plain": "is a Plain.*; give the class", "Failing": BOOM, "Unbuilt": BOOM,
        "Empty": r"cells: returns a NoneType; return float32\(1, 2, 2, 4\), where 4 is policy",
        "Wide": r"cells: returns float32\(1, 2, 2, 1\); return float32\(1, 2, 2, 4\)",
        "Fieldless": "receptive_field: returns a NoneType; return a number of bars",
        "FewField": COUNT, "FewBegin": COUNT, "Asking": "constructor asks for size; it is given",
        "Dropping": "is a Rng.*; a policy may hold nnx.Param only",
        "Net(layers=2)": "its constructor takes no value 'layers'; it takes",
        "Asking(depth=2)": "asks for size; .* or values in parentheses",
        "Streamed": r"stream: returns \(float32\(\), float32\(2, 1\)\); return .*2, 4\)",
        "NoStream": "stream: returns a NoneType; return",
        "Headed": r"HEAD: returns .*; return .*, logits and a value", "PlainHead": COUNT,
    },
    "advantages": {
        "estimating": CALL, "one": COUNT, "Plain": COUNT, "plain": "is a Plain.*; give a function",
        "none": r"returns a NoneType; return \[3\]", "total": r"returns float32\(\); return \[3\]",
        "raises": BOOM,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def slips(tmp_path, monkeypatch):
    (tmp_path / "slips.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("slips", None)
    for forget in FORGET:
        forget()


@pytest.mark.parametrize("kind", SLIPS)
def test_a_slip_in_own_code_is_one_line_that_says_what_to_do(kind):
    for name in GOOD.get(kind, ()):
        KINDS[kind](f"slips:{name}")
    for name, says in SLIPS[kind].items():
        with pytest.raises(ConfigError, match=says) as refused:
            KINDS[kind](f"slips:{name}")
        assert len(str(refused.value).splitlines()) == 1, name
        assert name in str(refused.value)
