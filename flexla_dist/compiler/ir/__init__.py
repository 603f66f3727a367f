"""The intermediate form: operators, graphs of them, and their derivatives."""
