"""What ranks say to each other: bytes of shards asked for, gradients given away, small notes.

`links` carries messages and notices deaths, `rendezvous` makes links of a process group, `inbox`
puts gradients into an order, `parcels` keeps those that wait, `store` is the state of a rank that
owns shards. How they play together is in docs/design/0005-one-sided-exchange.md.
"""
