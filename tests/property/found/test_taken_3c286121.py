"""Found by `leftfold fuzz --profile swarm --seed 399133591 --skip 62 --runs 1`: Violation: taken: a
plan with a wrong slot was taken: Plan(step=2, base=None, join=[Join(slot=1, rid='b', choice=0, start=0,
pages=[[0]], epoch=0)], preempt=[], chunks=[Chunk(slot=1, length=1, samples=True)], width=1, grow=(), evict=(),
ops=(), ends=(), memo=None)"""

from leftfold.replay.fuzzing import World


def test_taken_3c286121() -> None:
    world = World(
        vocab=1048576,
        num_pages=2,
        page_size=1,
        max_running=2,
        max_batch_tokens=2,
        max_model_len=2,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=False,
        growth_horizon=0,
        routers=False,
    )
    world.admit(rid="e", prompt=[1])
    world.admit(rid="g", prompt=[1])
    world.steps()
    world.control(kind="Reconfigure")
    world.admit(rid="b", prompt=[1])
    world.spoiled_plan(kind="slot")
