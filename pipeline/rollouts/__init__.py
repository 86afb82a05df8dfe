"""From admitted groups to finished trajectories: who runs when, under which version, within what limits."""
