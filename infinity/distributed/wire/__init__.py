"""The connections between ranks: how they meet, what they say, and how they learn of a death."""
