"""Every constant of the default policy: its unit and what it means.

None of them is meant to be set by a user. What half and twice of each does to throughput, in computed worlds and recorded traces:
docs/policies.md#constants (`studies/constants.py` measures it). Sizes that only bound rounding errors stay where they are used.
"""

# The cost model: control/costs.py and control/cost_fit.py.
PROFILE_WEIGHT = 8.0      # observations: what one measurement of a profile counts for (it is a median of several)
FEW_STEPS = 8             # steps: after so many live ones it is roughly known what steps cost
SAME_SPEED = 0.1          # log ratio: a smaller change of speed is not believed when a kept profile is checked
BEND = 32                 # tokens: the smooth curve has one slope up to here and another beyond
FLAT_PRIOR = 0.3          # observations: how much a flat curve counts for, in the fit of the smooth one
SMOOTH_PRIOR = 0.5        # observations: how much the smooth curve counts for, in the fit of the bent one
CELL_MEMORY = 24.0        # observations: a cell remembers no more
CELL_FADE = 300.0         # observations: after so many of other cells, what a cell remembers counts half against the next one
CELL_DEVALUATION = 3.0    # per log ratio: cells lose exp(-this * change) of their weight when the machine's speed changes
LEAST_WEIGHT = 0.1        # observations: a cell that is devalued to less is forgotten
MAX_CELLS = 320           # cells: the one that was not used for longest is dropped
LEARN_ALL = 256           # observations: up to here each is learned from
LEARN_EVERY = 3           # observations: later one in so many is, for learning takes time
FIRST_REFIT = 32          # observations: until the first refit of a fit that began with a profile
REFIT_EVERY = 64          # observations: a refit comes at the latest after so many
REFIT_SURPRISES = 2       # observations: after so many that no noise explains, it refits at once
RECENT_ERRORS = 128       # observations: the typical error is the median of so many
SPEED_GAIN = 0.06         # share: of each log error goes into the factor for the machine's speed
SPEED_CHANGE = 0.2        # log ratio: a larger change of speed devalues the cells, for not everything slows down alike
OUTLIER_RUN = 6           # steps: so many in a row that took far too long are no outliers
IN_PARTS = 1.5            # ratio: a cell slower than its parts by more was something else, such as compilation, and is dropped

# Acceptance: control/goodput/acceptance.py and drafter_state.py.
PRIOR_ACCEPTANCE = 0.6    # probability: acceptance before anything was seen, high enough to try
LINE_WEIGHT = 4.0         # judged tokens: what the confidence as it is stated counts for, against how it turned out
PSEUDO_COUNTS = 20.0      # judged tokens: what the expected rate counts for, in each bin and position
POOL_MEMORY = 600.0       # judged tokens: a bin or position remembers no more
REQUEST_PRECISION = 2.0   # 1 / variance: how alike requests are at first, in log odds
REQUEST_MEMORY = 3.0      # 1 / variance: what a request gathers at most; a judged token brings at most 0.25
SAVED_SHARE = 0.25        # share: of the evidence that counts in the next run, for another workload may come
JUDGED_GROUP = 128        # judged tokens: learned from together, for each call takes time
JUDGED_WAIT = 16          # steps: a judged token waits no longer to be learned from
LEARNED_PER_STEP = 24     # drafts: learned from in one step, for a large batch has more than is needed

# What asking a drafter brings: control/goodput/gain.py.
FIRST_GAIN = 1.0          # tokens: what an ask of an unknown drafter brings
PRIOR_ASKS = 3.0          # asks: what the mean of all requests counts for in that of a new one
POOL_SHARE = 0.003        # share: of one more ask in the mean of all requests, once it has 1 / this
OWN_SHARE = 0.08          # share: of one more ask in the mean of one request, once it has 1 / this
REQUEST_TRUST = 0.5       # share: of the difference between the two means that is believed

# A new drafter: control/goodput/drafter_state.py.
FIRST_ASKS = 32           # asks: a drafter is new for so long, and half as many requests ask it in one step
KNOWN_ASKS = 16           # asks: the same for one that was known in an earlier run
FIRST_DEPTHS = (4, 1, 1 << 30, 2)   # tokens: to draft in its first steps, for what depth costs shows only when it varies
PRICE_STEPS = 8           # steps: a drafter's price is looked up again after so many

# Who is asked, for how much: control/goodput/assignment.py, draft_length.py, verification.py and policies/goodput.py.
HOLD_STEPS = 4            # steps: who is asked stays decided for so long while the batch is the same
LOOKUP_PRICE = 0.1        # tokens: a drafter whose draft costs no more is looked up before another one is asked
STEEP = 0.02              # plain steps: drafting to max_k that costs so much more than one token makes the depth matter
SLOW = 0.15               # plain steps: a drafter that takes so long for one more token of everybody is asked token by token
PASSES_AHEAD = 4          # passes: of drafting that are looked ahead before going on
FEW_DRAFTS = 96           # drafts: up to so many, lists are quicker than arrays
SLO_POINTS = 16           # totals: of verified drafts at which targets are checked
MEAN_MEMORY = 100.0       # steps: that the means of speed-up, of the policy's own time and of the breadth of trees remember

# Finding out, and the guard: control/goodput/budget.py and guard.py.
LOAN = 1.0                # plain steps: may be lost before anything was won, and the most that an account is overdrawn later
PROBE_SHARE = 0.01        # share: of the time that goes into finding out, over all drafters
MOST_SAVED = 10.0         # plain steps: that can be saved up for probes
PLAIN_SHARE = 0.002       # share: of the steps that are made plain, to measure what they take
STALE_SPEED = 0.15        # log ratio: after such a change of the machine's speed the last plain step says little
STALE_STEPS = 20          # steps: between two plain ones made for that reason
TOLERANCE = 0.01          # plain steps per step: a loss that counts as none
ACCOUNT_MEMORY = 150.0    # steps: an account remembers no more
ACCOUNT_LEAST = 20.0      # steps: before an account is judged
OFF_STEPS = 50            # steps: a drafter stays off at least
RETURN_MARGIN = 1.5       # ratio: of gain to price that shadow drafts must promise before a drafter is on again
