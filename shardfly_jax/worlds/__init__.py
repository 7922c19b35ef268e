"""Updates across processes: rendezvous, control channel, attempts. What they promise: `docs/design/worlds.md`."""
