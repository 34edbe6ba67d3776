"""Whole programs under drawn schedules, a mock clock and injected faults."""
