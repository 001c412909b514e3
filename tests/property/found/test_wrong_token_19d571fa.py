"""Found by `leftfold fuzz --profile faults --seed 1618929007 --skip 2 --runs 1`: Violation:
wrong-token: ('c', 0, 0) heard 0 at position 4, expected 1"""

from leftfold.replay.fuzzing import DurableWorld


def test_wrong_token_19d571fa() -> None:
    world = DurableWorld(
        vocab=2,
        num_pages=2,
        page_size=2,
        max_running=1,
        max_batch_tokens=2,
        max_model_len=5,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=False,
        segment_bytes=1,
        sync_every=1,
    )
    world.admit(rid="c", prompt=[0])
    world.steps(count=3)
    world.control(kind="Sleep")
    world.tick()
    world.start(kept=["device"])
    world.steps()
