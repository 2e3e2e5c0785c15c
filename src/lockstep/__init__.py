"""The rooms of Lockstep. Importing this package imports none of them: `--help` must answer before torch is loaded."""
