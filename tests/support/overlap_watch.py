"""Record of launches, with checks of the bounds that the host mirrors."""


class Watch:
    """Launches of an engine."""

    def __init__(self, engine):
        self.loop, self.launched = engine.loop, []  # (steps in flight, does the host wait)
        whole = self.loop._launch

        def launch():
            before = len(self.loop.pending)
            flight = whole()
            if flight is not None:
                self.launched.append((before, flight.needs_sync))
                self.bounds()
            return flight

        self.loop._launch = launch

    def bounds(self):
        """Check that upper bounds of the host hold on the device."""
        scheduler, columns = self.loop.scheduler, self.loop.slots.columns
        for sequence in scheduler.running:
            slot = sequence.slot
            host = scheduler.mirror
            assert int(columns.num_draft[slot]) <= host.num_draft[slot] <= sequence.draft_limit
            assert 0 <= host.in_flight[slot] <= self.loop.policy.run_ahead.depth
            if not int(columns.finish_status[slot]):
                assert host.length[slot] + host.in_flight[slot] <= int(columns.length[slot])
            assert int(columns.length[slot]) <= sequence.max_length

    def check(self):
        assert all(not (before and waits) for before, waits in self.launched), "launched without draining"
        return sum(before > 0 for before, _ in self.launched), sum(waits for _, waits in self.launched)
