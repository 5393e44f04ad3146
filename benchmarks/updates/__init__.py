"""Single updates of PPO and SAC."""
