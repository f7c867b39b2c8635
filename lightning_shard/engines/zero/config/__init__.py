# ruff: noqa: F401
"""DeepSpeed's configuration: typed fields and a user's JSON file in, one checked mapping out.

`DeepSpeedFields` is what a user sets, `check_fields` refuses what can't work before anything is started, `RunFacts` is
what the run says, and `deepspeed_config` puts both together. DeepSpeed is imported inside the functions that ask it
for its keys.
"""

from lightning_shard.engines.zero.config.building import deepspeed_config, dump_config
from lightning_shard.engines.zero.config.checks import check_fields, check_policy, loss_scaling_from
from lightning_shard.engines.zero.config.fields import (
    DeepSpeedFields,
    OptimizerOffload,
    ParameterOffload,
    RunFacts,
    Stage3Options,
    ZeroBuckets,
    ZeroPlusPlus,
    planned_facts,
    run_facts,
)
from lightning_shard.engines.zero.config.merging import Effective, effective
from lightning_shard.engines.zero.config.reading import read_config
