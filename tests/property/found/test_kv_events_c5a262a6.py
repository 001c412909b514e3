"""Found by `leftfold fuzz --profile swarm --seed 30112026 --skip 89318 --runs 1`: Violation:
kv-events: KvStored(tier='device', group=0, key=b'/xb6/x12/x1c/xa3/xd3/xd6<JN/xf4`/x16/x161V/xc1', parent=None,
tokens=(1, 1, 1, 1, 1, 1, 1, 1, 1, 39)) is of a generation that is over"""

from leftfold.replay.fuzzing import World


def test_kv_events_c5a262a6() -> None:
    world = World(
        vocab=50,
        num_pages=2,
        page_size=10,
        max_running=1,
        max_batch_tokens=3,
        max_model_len=12,
        pipeline_depth=1,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=True,
    )
    world.admit(rid="h", prompt=[1, 1, 1, 1, 1, 1, 1, 1, 1])
    world.control(kind="UpdateWeights")
    world.steps()
    world.steps()
    world.steps(count=3)
    world.done()
    world.tick()
    world.control(kind="Wake")
    world.control(kind="Sleep")
    world.control(kind="Call")
    world.steps(count=4)
    world.start()
    world.control(kind="Call")
    world.control(kind="Call")
    world.tick()
    world.control(kind="Reconfigure")
    world.control(kind="FlushCache")
    world.finish()
