"""Found by `leftfold fuzz --profile faults --seed 30112043 --skip 3039 --runs 1` at 67526c43ee99: Violation:
log-refused: 00000002.jsonl could not be read, and the log was changed"""

from leftfold.replay.fuzzing import DurableWorld


def test_log_refused_9ccab30f() -> None:
    world = DurableWorld(
        vocab=50,
        num_pages=1,
        page_size=1,
        max_running=1,
        max_batch_tokens=1,
        max_model_len=1,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=False,
        growth_horizon=0,
        routers=False,
        segment_bytes=1,
        sync_every=1,
    )
    world.control(kind="Resume")
    world.start()
    world.snapshot()
    world.full_disk(room=1)
    world.admit(rid="r1", prompt=[1])
    world.crash(read_error=0, damage="lost")
