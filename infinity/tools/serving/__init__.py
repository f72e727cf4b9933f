"""An adapter for servers: its layout for each of them, and the check of what is served."""
