"""Everything that decides without a policy: rules, blends, targets."""
