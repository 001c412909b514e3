"""Found by `leftfold fuzz --profile swarm --seed 30112028 --skip 15898 --runs 1`: Violation:
wrong-token: ('h', 0, 0) heard 1 at position 3, expected 8"""

from leftfold.replay.fuzzing import World


def test_wrong_token_a6bac609() -> None:
    world = World(
        vocab=9,
        num_pages=2,
        page_size=2,
        max_running=1,
        max_batch_tokens=1,
        max_model_len=4,
        pipeline_depth=1,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=True,
    )
    world.admit(rid="h", prompt=[5])
    world.steps(count=2)
    world.control(kind="Sleep")
    world.shutdown(deadline=5)
    world.tick()
    world.tick()
    world.steps(count=3)
    world.start(kept=["device"])
    world.tick()
    world.steps()
