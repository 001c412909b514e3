"""Found by `leftfold fuzz --profile swarm --seed 5 --skip 186 --runs 1` at 4ca93c7f9985: Violation: victim: ('a',
0, 0) loses its seat by other limits, ('b', 0, 0) stays (1 rows)"""

from leftfold.replay.fuzzing import World


def test_victim_62b49a88() -> None:
    world = World(
        vocab=2,
        num_pages=2,
        page_size=2,
        max_running=2,
        max_batch_tokens=2,
        max_model_len=3,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=False,
        growth_horizon=1,
        routers=False,
    )
    world.admit(rid="a", prompt=[1])
    world.admit(rid="b", prompt=[1])
    world.tick()
    world.abort(rid="a")
    world.admit(rid="a", prompt=[1])
    world.control(kind="Reconfigure", set={'max_chunk_tokens': 2, 'policy': 'priority'})
    world.finish()
