"""From the user's callables to graphs."""
