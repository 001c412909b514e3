"""Found by `leftfold fuzz --profile lite --seed 1 --skip 224 --runs 1`: Violation: wrong-token:
('a', 0, 0) heard 350817 at position 3, expected 534714"""

from leftfold.replay.fuzzing import World


def test_wrong_token_04a5bcb9() -> None:
    world = World(
        vocab=1048576,
        num_pages=2,
        page_size=2,
        max_running=1,
        max_batch_tokens=2,
        max_model_len=4,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=False,
    )
    world.admit(rid="a", prompt=[1, 1])
    world.steps()
    world.control(kind="Sleep")
    world.tick()
    world.lose()
    world.start(kept=["device"])
    world.steps()
