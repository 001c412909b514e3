"""Found by `leftfold fuzz --profile lite --seed 5 --skip 255 --runs 1`: Violation: kept: {} can be
found after a start, expected {b'/xa47/x8f/x96/xebg+%/xc8/xce/x9d/xcf/x03:/xb7d': 0}"""

from leftfold.replay.fuzzing import World


def test_kept_544000b5() -> None:
    world = World(
        vocab=1048576,
        num_pages=1,
        page_size=1,
        max_running=1,
        max_batch_tokens=1,
        max_model_len=2,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=False,
    )
    world.admit(rid="f", prompt=[1])
    world.steps()
    world.control(kind="UpdateWeights")
    world.control(kind="FlushCache")
    world.tick()
    world.start(kept=["device"])
