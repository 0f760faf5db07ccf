"""Runs on a Ray cluster: what the engine (`launch.engines.ray`) is made of.

    cluster     the way in: a cluster that runs, or one of our own; what its nodes have room for
    ground      placement groups, with one bundle for each host agent; nodes that go and come
    actors      what runs there: an agent per bundle, and the scheduler
    post        an agent as the launcher sees it, and keeps it
    keeper      the same for the scheduler, which Ray starts again
    gauges      what members do, for Ray's metrics
    seat_host   in place of an agent, where members stay: with servers, meshes and torch's own groups
    desk        the way to these, and
    relay       what stands for each of them at the launcher

Ray is imported inside of functions, and only where a run is on Ray.
"""
