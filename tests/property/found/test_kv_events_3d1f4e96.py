"""Found by `leftfold fuzz --profile swarm --seed 3 --skip 2111 --runs 1`: Violation: kv-events:
KvStored(tier='device', group=0, key=b'I/x88/xc1'/xc4Yw/xa1/x8c/x92/xe9/x9a/xd7/x89/x8e/xf7', parent=None,
tokens=(1, 1)) has another key than follows from its parent and tokens"""

from leftfold.replay.fuzzing import World


def test_kv_events_3d1f4e96() -> None:
    world = World(
        vocab=50,
        num_pages=1,
        page_size=2,
        max_running=1,
        max_batch_tokens=2,
        max_model_len=3,
        pipeline_depth=2,
        policy="fcfs",
        prefix_cache=True,
        growth_horizon=0,
        routers=True,
    )
    world.control(kind="Sleep")
    world.control(kind="Sleep")
    world.admit(rid="f", prompt=[1, 1])
    world.steps(count=2)
    world.control(kind="Wake")
    world.steps(count=4)
    world.tick()
    world.control(kind="Reconfigure")
    world.control(kind="FlushCache")
    world.steps()
