"""Found by `leftfold fuzz --profile swarm --seed 11 --skip 860 --runs 1` at 618eac595d43: Violation: version:
Output(rid='d', epoch=0, choice=0, position=2, tokens=(), finish_reason=<FinishReason.LENGTH: 'length'>, error=None,
usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0), version='2'), but the weights are ''"""

from leftfold.replay.fuzzing import World


def test_version_9686fa56() -> None:
    world = World(
        vocab=9,
        num_pages=1,
        page_size=2,
        max_running=1,
        max_batch_tokens=1,
        max_model_len=3,
        pipeline_depth=0,
        policy="fcfs",
        prefix_cache=False,
        growth_horizon=1,
        routers=True,
    )
    world.admit(rid="d", prompt=[1])
    world.control(kind="UpdateWeights")
    world.steps(count=2)
    world.start(page_size=1)
