"""Environments, policies and factories that tests share."""
