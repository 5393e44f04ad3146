"""Names of the columns of recorded steps."""

OBS, NEW_OBS, ACTIONS, REWARDS = "obs", "new_obs", "actions", "rewards"
TERMINATEDS, TRUNCATEDS, EPS_ID, T = "terminateds", "truncateds", "eps_id", "t"
AGENT_INDEX, POLICY_ID = "agent_index", "policy_id"
EPISODE_COLUMNS = (EPS_ID, AGENT_INDEX, TERMINATEDS, TRUNCATEDS, T)
