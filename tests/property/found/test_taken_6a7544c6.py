"""Found by `leftfold fuzz --profile swarm --seed 4061358118 --skip 12083 --runs 1`: Violation:
taken: a plan with a wrong chunk too long was taken: Plan(step=2, base=None, join=[Join(slot=1, rid='d', choice=0,
start=0, pages=[[1]], epoch=0)], preempt=[], chunks=[Chunk(slot=0, length=0, samples=False), Chunk(slot=1, length=3,
samples=True)], width=1, grow=(), evict=(), ops=(), ends=(), memo=No"""

from leftfold.replay.fuzzing import World


def test_taken_6a7544c6() -> None:
    world = World(
        vocab=1048576,
        num_pages=2,
        page_size=3,
        max_running=2,
        max_batch_tokens=3,
        max_model_len=4,
        pipeline_depth=2,
        policy="fcfs",
        prefix_cache=False,
        growth_horizon=1,
        routers=False,
    )
    world.admit(rid="r25", prompt=[1, 1, 1])
    world.admit(rid="d", prompt=[1, 1, 1])
    world.steps()
    world.spoiled_plan(kind="chunk too long")
