"""Found by `leftfold fuzz --profile faults --seed 3307927860 --skip 5049 --runs 1`: Violation:
log-refused: the log cannot be opened, though nothing harmed it: 00000001.jsonl, line 1, byte 0: the segment is
empty"""

from leftfold.replay.fuzzing import DurableWorld


def test_log_refused_b838bb52() -> None:
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
        sync_every=0,
    )
    world.admit(rid="c", prompt=[1])
    world.lying_disk()
    world.space()
    world.crash()
    world.crash(power=True)
