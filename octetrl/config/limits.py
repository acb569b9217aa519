"""Upper limits of options that are fields of a recipe too, with the same limits there."""

MOST_COMPLETIONS = 100_000  # of one prompt: rollout.group_size, evaluation.samples
MOST_GPUS, MOST_CPUS = 65_536, 4_096  # cluster.gpus, cluster.cpus
