"""Found by `leftfold fuzz --profile faults --seed 20261130 --skip 17587 --runs 1`: ValueError:
invalid literal for int() with base 16: b'4f/x00/x00/x00/x00/x00/x00'"""

from leftfold.replay.fuzzing import DurableWorld


def test_value_error_22012424() -> None:
    world = DurableWorld(
        vocab=1048576,
        num_pages=1,
        page_size=1,
        max_running=1,
        max_batch_tokens=1,
        max_model_len=2,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=False,
        max_queued_requests=11,
        vocab_size=1048576,
        growth_horizon=1,
        routers=True,
        segment_bytes=738,
        sync_every=0,
    )
    world.sync()
    world.admit(rid="b", prompt=[1], stop=[1])
    world.admit(rid="b", prompt=[1])
    world.steps()
    world.crash(power=True, keep=329, hole=2, failed_sync=True, damage="taken out", at=51449)
