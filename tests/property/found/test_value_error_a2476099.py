"""Found by `leftfold fuzz --profile faults --seed 4 --skip 129 --runs 1`: ValueError: invalid
literal for int() with base 16: b'/x00/x00/x00/x00/x00/x00/x00/x00'"""

from leftfold.replay.fuzzing import DurableWorld


def test_value_error_a2476099() -> None:
    world = DurableWorld(
        vocab=1048576,
        num_pages=1,
        page_size=45,
        max_running=3,
        max_batch_tokens=50,
        max_model_len=270,
        pipeline_depth=2,
        policy="lpm",
        prefix_cache=False,
        vocab_size=1048576,
        growth_horizon=5,
        routers=False,
        segment_bytes=200,
        sync_every=2,
    )
    world.admit(rid="h", prompt=[9, 23, 15, 20, 20, 16, 43, 39, 44, 37, 4])
    world.admit(
        rid="a",
        prompt=[9, 23, 15, 20, 20, 16, 43, 39, 44, 37, 4, 36, 43, 37, 41, 11, 38, 8, 33, 27, 47, 16, 49, 43],
    )
    world.admit(
        rid="b",
        prompt=[9, 23, 15, 20, 20, 16, 43, 39, 44, 37, 4, 36, 43, 37, 41, 11, 38, 8, 33, 27, 47, 16, 49, 43,
             19, 2, 36, 8, 24, 39, 24, 24, 10, 9, 12, 36, 11, 9, 13, 11, 17],
        stop=[138837],
    )
    world.admit(
        rid="b",
        prompt=[47, 33, 21, 8, 19, 38, 41, 39, 15, 28, 11, 28, 3, 42, 24, 20],
        stop=[110169],
        min_tokens=1,
    )
    world.admit(
        rid="a",
        prompt=[47, 33, 21, 8, 19, 38, 41, 39, 15, 28, 11, 28, 3, 42, 24, 20, 42, 16, 39, 42, 21, 7, 38, 23,
             36, 8, 14, 42, 8, 47, 14, 44, 28, 49, 6, 41, 0, 14, 2, 13, 44, 4],
        priority=1,
    )
    world.admit(
        rid="g",
        prompt=[47, 33, 21, 8, 19, 38, 41, 39, 15, 28, 11, 28, 3, 42, 24, 20, 42, 16, 39, 42, 21, 7, 38, 23,
             36, 8, 14, 42, 8, 47, 14, 44, 28, 49, 6, 41, 0, 14, 2, 13, 44, 4],
        max_tokens=1,
    )
    world.admit(
        rid="f",
        prompt=[47, 33, 21, 8, 19, 38, 41, 39, 15, 28, 11, 28, 3, 42, 24, 20, 42, 16, 39, 42, 21, 7, 38, 23,
             36, 8, 14, 42, 8, 47, 14, 44, 28, 49],
        stop=[334597],
    )
    world.lying_disk()
    world.tick()
    world.tick()
    world.wait(us=193007539185)
    world.crash(power=True)
    world.stray_done()
    world.crash()
    world.tick()
    world.odd_admit(kind="negative stop id")
    world.snapshot()
    world.lying_disk()
    world.admit(rid="f", prompt=[9, 23, 15, 20, 20, 16, 43], stop=[840867])
    world.crash(power=True, keep=286, hole=15, damage="taken out", at=37311, other=16336)
