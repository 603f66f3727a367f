"""Helpers of the tests: seeded inputs, error budgets, processes, poisoned memory."""
