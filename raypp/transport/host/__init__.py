"""Links through host memory: `local`, `gloo` and `ray_collective`."""
