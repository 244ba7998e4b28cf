"""Trains a config under a plan of faults, and compares the end with that of an undisturbed run."""
