"""Numbers of the recipe's schema that others need too, without the cost of importing it."""

MOST_COMPLETIONS = 100_000  # for one prompt: rollout.group_size, evaluation.samples
LEAST_OWN_TEMPERATURE = 0.001  # of an environment's or a task's training answers
MOST_TEMPERATURE = 10.0
MOST_GPUS, MOST_CPUS = 65_536, 4_096  # cluster.gpus, cluster.cpus
MISMATCH_LIMIT = 1.03  # default of mismatch.warn_above
