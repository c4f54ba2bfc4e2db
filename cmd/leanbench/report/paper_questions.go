package report

import (
	"regexp"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// What docs/paper.md has of each figure of the paper.

const (
	// publishedBy is before the paper's GPUs in the report of what the paper says, whose tables, cases and
	// metrics are those of what is measured here.
	publishedBy = "LeanAttention, "

	// SameSpeed is the least ratio that is 1.00 in two digits.
	SameSpeed = 0.995

	// tableScale is the scale command's table of attention.
	tableScale = "Attention of a decode step with its heads or contexts on several GPUs, all in float16, pages of 64, recorded"

	// PaperAll is the table of what all figures of a machine come to.
	PaperAll = "All figures of one device"

	lean, attend         = "lean", "lean, Attend" // ours, on a GPU and on cores
	fixedSplit, perHead  = "lean, fixed split", "lean, per head"
	flashDecoding, cuDNN = "PyTorch, FLASH_ATTENTION", "PyTorch, CUDNN_ATTENTION"
	flashVarlen          = flashDecoding + ", varlen"
	flashInfer           = "FlashInfer, pages of 16"
	flashInferCores      = "FlashInfer on tensor cores, pages of 16"
	flashInferBatch      = "FlashInfer, BatchAttention, pages of 16"
	compiled             = "transformers, compiled"
	onOurKernel          = ", our kernel"
	headFixed, headHeads = "x fixed split" + onOurKernel, "x per head" + onOurKernel
)

// paperColumns are those of a shape: on a GPU, and on cores.
var paperColumns = []column{
	{head: "ours, us", who: lean, metric: us, form: "3"}, {head: "of the ceiling", who: lean, metric: ofCeiling},
	{head: "x FlashDecoding", who: lean, metric: measure.OverFlash, form: "f2"}, {head: "x FLASH, varlen", who: lean, metric: measure.OverVarlen, form: "f2"},
	{head: "x FlashInfer", who: lean, metric: measure.OverInfer, form: "f2"}, {head: "x cuDNN", who: lean, metric: measure.OverCUDNN, form: "f2"},
	{head: headFixed, who: lean, metric: measure.OverFixed, form: "f2"}, {head: headHeads, who: lean, metric: measure.OverPerHead, form: "f2"},
	{head: "ours, us", who: attend, metric: us, form: "3"}, {head: "of the ceiling", who: attend, metric: measure.Share},
	{head: "x default node", who: attend, metric: measure.OverStock, form: "f2"}, {head: "x PyTorch", who: attend, metric: measure.OverTorch, form: "f2"},
	{head: headFixed, who: attend, metric: measure.OverFixed, form: "f2"}, {head: headHeads, who: attend, metric: measure.OverPerHead, form: "f2"},
}

// paperSeries have the same colours in all pictures.
var paperSeries = []column{
	{head: "FlashDecoding", who: lean, metric: measure.OverFlash, tint: 1}, {head: "FLASH, varlen", who: lean, metric: measure.OverVarlen, tint: 5},
	{head: "FlashInfer", who: lean, metric: measure.OverInfer, tint: 2}, {head: "cuDNN", who: lean, metric: measure.OverCUDNN, tint: 3},
	{head: "fixed split" + onOurKernel, who: lean, metric: measure.OverFixed, tint: 4}, {head: "per head" + onOurKernel, who: lean, metric: measure.OverPerHead, tint: 6},
	{head: "default node", who: attend, metric: measure.OverStock, tint: 1}, {head: "PyTorch", who: attend, metric: measure.OverTorch, tint: 2},
	{head: "fixed split" + onOurKernel, who: attend, metric: measure.OverFixed, tint: 4}, {head: "per head" + onOurKernel, who: attend, metric: measure.OverPerHead, tint: 6},
}

// Where in a case its numbers are.
var (
	byContext   = regexp.MustCompile(`^(?P<series>)b\d+, [\d/]+ heads x (?P<row>\d+) x \d+$`)
	byHeads     = regexp.MustCompile(`^(?P<series>)b\d+, (?P<row>\d+) heads x \d+ x \d+$`)
	bySequences = regexp.MustCompile(`^(?P<series>)b(?P<row>\d+), \d+ heads x \d+ x \d+$`)
)

// along is a panel whose shapes differ by one number.
func along(id, title, text, x string, split *regexp.Regexp) question {
	return question{
		id: id, title: title, text: text, tables: []string{"Figure " + id}, head: x, split: split, columns: paperColumns,
		picture: picture{kind: "lines", x: x, y: "how many times as fast as", logX: true, ticks: true, bar: 1, series: paperSeries},
	}
}

// listed is a panel whose shapes have names.
func listed(id, title, text, table string) question {
	return question{
		id: id, title: title, text: text, tables: []string{table}, head: "shape", columns: paperColumns,
		picture: picture{kind: "bars", x: "how many times as fast as", y: "shape", bar: 1, series: paperSeries},
	}
}

// scaled is a question about what the scale command measured of some shapes, a line for each, by heads or by context.
func scaled(id, title, text string, bar float64, cases string) question {
	return question{
		id: id, title: title, text: text, tables: []string{tableScale}, head: "shape", only: regexp.MustCompile(cases),
		columns: []column{
			{head: "one GPU, us", who: "one GPU", metric: measure.LayerMicros}, {head: "x FlashDecoding", who: "one GPU", metric: measure.OverFlash},
			{head: "2 GPUs, us", who: "2 GPUs", metric: measure.LayerMicros}, {head: "x one GPU", who: "2 GPUs", metric: measure.OverOneGPU}, {head: "x FlashDecoding", who: "2 GPUs", metric: measure.OverFlash},
			{head: "4 GPUs, us", who: "4 GPUs", metric: measure.LayerMicros}, {head: "x one GPU", who: "4 GPUs", metric: measure.OverOneGPU}, {head: "x FlashDecoding", who: "4 GPUs", metric: measure.OverFlash},
		},
		picture: picture{kind: "bars", x: "how many times as fast", y: "shape", bar: bar, series: []column{
			{head: "2 GPUs: as one GPU", who: "2 GPUs", metric: measure.OverOneGPU, tint: 6}, {head: "4 GPUs: as one GPU", who: "4 GPUs", metric: measure.OverOneGPU, tint: 7},
			{head: "2 GPUs: as FlashDecoding", who: "2 GPUs", metric: measure.OverFlash, tint: 2}, {head: "4 GPUs: as FlashDecoding", who: "4 GPUs", metric: measure.OverFlash, tint: 1}}},
	}
}

// joules is the column of somebody's energy for each GB.
func joules(head, who string) column {
	return column{head: head, who: who, metric: measure.ByteJoules, form: "3"}
}

// fourGPUs are the columns of a number of heads.
func fourGPUs(heads string) []column {
	return []column{
		{head: heads + " heads, us", series: heads, who: "4 GPUs", metric: measure.LayerMicros}, {head: "x one GPU", series: heads, who: "4 GPUs", metric: measure.OverOneGPU},
		{head: "x FlashDecoding", series: heads, who: "4 GPUs", metric: measure.OverFlash},
	}
}

var paperQuestions = []question{
	{
		id: "3", title: "Figure 3: how busy the multiprocessors are",
		text:   "One sequence, 56 heads of 64. The paper has Nsight Compute's counters of FlashDecoding, whose 56 output tiles do not fit 108 multiprocessors evenly. By the schedule: the share of multiprocessors' time in which they have LeanTiles. Counted: that in which they have a warp, by the GPU's counters, which NVML reads while a program runs. Beside them is the share of the memory's speed: where some multiprocessors have nothing to do the others get more of the memory, so that the shares differ.",
		tables: []string{"Figure 3"}, head: "context, tokens", split: byContext, contenders: true,
		columns: []column{{head: "us", metric: us, form: "3"}, {head: "busy, by the schedule", metric: measure.BusyShare}, {head: "busy, counted", metric: measure.BusyCounted}, {head: "of the ceiling", metric: ofCeiling}},
		picture: picture{kind: "lines", x: "context, tokens", y: "share of the read ceiling, %", logX: true, ticks: true, percent: true, series: []column{
			{head: "ours", who: lean, metric: ofCeiling, tint: 7}, {head: "fixed split" + onOurKernel, who: fixedSplit, metric: ofCeiling, tint: 4}, {head: "per head" + onOurKernel, who: perHead, metric: ofCeiling, tint: 6},
			{head: "FlashDecoding", who: flashDecoding, metric: ofCeiling, tint: 1}, {head: "cuDNN", who: cuDNN, metric: ofCeiling, tint: 3},
			{head: "FlashInfer", who: flashInfer, metric: ofCeiling, tint: 2}}},
	},
	along("7a", "Figure 7a: contexts", "4 sequences, 32 heads of 64; the paper's A100. Its speed-up over FlashDecoding is near 2 for short contexts and 2.18 at 262144 tokens.", "context, tokens", byContext),
	along("7b", "Figure 7b: heads", "Heads of 64. On a GPU 4 sequences of 262144 tokens, as the paper has them; on cores one of 16384. The paper gains more than 2 over FlashDecoding above 24 heads.", "heads", byHeads),
	along("7c", "Figure 7c: sequences", "On a GPU 32 heads of 64 over 65536 tokens, on cores 12 over 4096; the paper's text does not give its own. It gains more than 1.5 over FlashDecoding above 4 sequences.", "sequences", bySequences),
	along("8a", "Figure 8a: contexts", "6 sequences, 48 heads of 64; the paper's H100. Its speed-up over FlashDecoding is 2.52 at 65536 tokens, and over FlashInfer 4.48.", "context, tokens", byContext),
	along("8b", "Figure 8b: heads", "6 sequences of 65536 tokens, heads of 64.", "heads", byHeads),
	along("8c", "Figure 8c: sequences", "48 heads of 64 over 65536 tokens; the paper's text gives neither.", "sequences", bySequences),
	listed("peaks", "Where the paper gains most", "The shapes that the paper names for its largest speed-ups.", "Figures 7 and 8, where the paper gains most"),
	listed("10", "Figure 10: contexts of several lengths", "One context of the largest length; the others are equal, and the average is a share of the largest. Keys are in pages of 16 on a GPU. `scaled_dot_product_attention` has no such batches: FLASH, varlen is PyTorch's kernel for them, which splits no context; on cores PyTorch and the default nodes attend to one sequence after the other.", "Figure 10"),
	listed("10suites", "Ragged batches of other projects", "The batches of hpc-ops' dynamic schedule and of FlashInfer's paper (16 sequences; its random lengths are quantiles here).", "Figure 10, suites of other projects"),
	listed("11", "Figure 11: heads of 128", "The attention of three models. The paper's speed-up over FlashDecoding is 1.34 at 8192 tokens and 3.5 at 131072, without saying of which model and batch.", "Figure 11"),
	{
		id: "13", title: "Figure 13: energy",
		text:   "The whole GPU's, by NVML's counter, while one program runs, in turns. mJ a token are those of one sequence's attention in one layer; the others are mJ for each GB of keys and values read. The ceiling is the bound: attention draws what it takes to read, and what it takes to compute. The paper draws ratios to FlashDecoding for one sequence with 56 heads of 64, and gives no number. Bar: 80% of FlashDecoding's energy, for one sequence from 131072 tokens on and for several. Groups of query heads and heads of 128 are none of the paper's shapes.",
		tables: []string{"Figure 13", "Figure 13, other shapes"}, head: "shape",
		columns: []column{
			{head: "ours, W", who: lean, metric: measure.Watts}, {head: "mJ a token", who: lean, metric: measure.TokenJoules, form: "3"}, joules("ours, mJ/GB", lean),
			joules("ceiling", measure.ReadCeiling), joules("FlashDecoding", flashDecoding), joules("FLASH, varlen", flashVarlen), joules("cuDNN", cuDNN),
			joules("FlashInfer", flashInfer), joules("on tensor cores", flashInferCores), joules("BatchAttention", flashInferBatch),
			joules("fixed split"+onOurKernel, fixedSplit), joules("per head"+onOurKernel, perHead),
			{head: "ours of the ceiling's", who: lean, metric: measure.OfReadJoules, form: "f2"}, {head: "of FlashDecoding's", who: lean, metric: measure.OfFlashJoules, form: "f2"},
		},
		picture: picture{kind: "bars", x: "mJ for each GB of keys and values", y: "shape", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: measure.ByteJoules, tint: 6}, {head: "ours", who: lean, metric: measure.ByteJoules, tint: 7},
			{head: "FlashDecoding", who: flashDecoding, metric: measure.ByteJoules, tint: 1}, {head: "cuDNN", who: cuDNN, metric: measure.ByteJoules, tint: 3},
			{head: "FlashInfer", who: flashInfer, metric: measure.ByteJoules, tint: 2}, {head: "FlashInfer, tensor cores", who: flashInferCores, metric: measure.ByteJoules, tint: 5},
			{head: "FlashInfer, BatchAttention", who: flashInferBatch, metric: measure.ByteJoules, tint: 4}}},
	},
	{
		id: "9", title: "Figure 9: several GPUs",
		text:   "4 sequences, heads of 64, which are dealt out to the GPUs; a recorded step, keys in pages of 64. The paper has 8 A100 and gains more than 2 over FlashDecoding's schedule with 256 heads. Here each GPU computes its own heads, so that each has its own schedule; FlashDecoding is PyTorch's of one GPU's share of the heads, alone.",
		tables: []string{"Figure 9"}, head: "shape", contenders: true,
		columns: []column{{head: "us", metric: measure.LayerMicros}, {head: "GB/s", metric: measure.Speed}, {head: "x one GPU", metric: measure.OverOneGPU}, {head: headFixed, metric: measure.OverFixed}, {head: "x FlashDecoding", metric: measure.OverFlash}},
		picture: picture{kind: "bars", x: "GB/s of keys and values", y: "shape", series: []column{
			{head: "one GPU", who: "one GPU", metric: measure.Speed, tint: 6}, {head: "2 GPUs", who: "2 GPUs", metric: measure.Speed, tint: 1},
			{head: "4 GPUs", who: "4 GPUs", metric: measure.Speed, tint: 3}, {head: "8 GPUs", who: "8 GPUs", metric: measure.Speed, tint: 4},
			{head: "2 GPUs, FlashDecoding", who: "2 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 5}, {head: "4 GPUs, FlashDecoding", who: "4 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 2},
			{head: "8 GPUs, FlashDecoding", who: "8 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 7}}},
	},
	{
		id: "9contexts", title: "Figure 9: four GPUs, by contexts",
		text:   "The same by `leanbench scale -gpus 2,4 -match '^b4,' -python PYTHON`: 4 sequences, heads of 64, contexts up to 1048576 tokens. us are those of four GPUs; x FlashDecoding is to PyTorch's of a quarter of the heads on one GPU, alone, with no fork and join. Bars: 3.8 times one GPU (the dashed line), and 2 times FlashDecoding with 256 heads, which the paper has of eight GPUs. Where a field is empty one GPU lacks the memory. With few output tiles FlashDecoding splits contexts, and is nearly as fast; 256 output tiles on a GPU, a quarter of 256 heads of 4 sequences, are past that: it splits nothing and reads at half of the speed.",
		tables: []string{tableScale}, head: "context, tokens", only: regexp.MustCompile(`^b4, \d+ heads `),
		split:   regexp.MustCompile(`^b4, (?P<series>\d+) heads x (?P<row>\d+) x 64$`),
		columns: slices.Concat(fourGPUs("64"), fourGPUs("128"), fourGPUs("160"), fourGPUs("256")),
		picture: picture{kind: "lines", x: "context, tokens", y: "how many times as fast as", logX: true, ticks: true, bar: 3.8, series: []column{
			{head: "64 heads, one GPU", series: "64", who: "4 GPUs", metric: measure.OverOneGPU, tint: 6}, {head: "256 heads, one GPU", series: "256", who: "4 GPUs", metric: measure.OverOneGPU, tint: 7},
			{head: "64 heads, FlashDecoding", series: "64", who: "4 GPUs", metric: measure.OverFlash, tint: 2}, {head: "256 heads, FlashDecoding", series: "256", who: "4 GPUs", metric: measure.OverFlash, tint: 1}}},
	},
	scaled("9heads", "Long sequences on four GPUs by heads",
		"`leanbench scale -gpus 2,4 -match '^b(1|6|16),' -python PYTHON`. KV heads are dealt out, as above. Bars: 3.8 times one GPU on four (the dashed line), 1.95 on two for some. A step forks to the other GPUs once and joins them once, which takes 14 to 18 us on four. Steps have eight layers, but four or five where these take 20 GB, and one with 4194304 tokens. FlashDecoding's share of the heads is measured alone, with no fork and join. It is ahead with 64 tokens, where there is nearly nothing to read.",
		3.8, `^b[16], (48|64/8) heads `),
	scaled("9context", "Long sequences on four GPUs by context",
		"The same run. Each GPU has a part of each context, and attends to it with all heads; a launch exchanges the states and merges them. Bars from 1048576 tokens on: 3.6 times one GPU on four (the dashed line), 1.85 on two for some. Steps have eight layers, but one with 4194304 tokens. With 512 tokens there is nearly nothing to read: on four GPUs fork, join, exchange and merging take 6 us of each of eight layers. Of 4194304 tokens with one KV head, a quarter alone takes one GPU what 1048576 tokens take. Four GPUs take 20 us more, and the bar leaves 2. Of 1048576 tokens, a quarter alone would take one GPU 21 us, by a straight line through its two times; the bar is at 18. FlashDecoding's share of the context is measured alone, and nothing is merged. It is ahead with 512 tokens, and with 16 sequences of 32/1 heads of 128, there on one GPU, too.",
		3.6, `^b\d+, (1|\d+/1) heads |, by context$`),
	{
		id: "12", title: "Figure 12: end to end",
		text:   "A prompt and an eighth as many tokens behind it, one sequence. The paper decodes with Phi-3-medium in ONNX Runtime and gains 1.12 over FlashDecoding for the first 1024 tokens, and 1.73 over FlashAttention-2 on average above 16384. Here decoders of OPT-6.7b's and Phi-3-medium's shapes have random weights. Steps are timed in the middle of the tokens, and count as the mean of all. Fixed split has 8 splits, which keep the memory nearly as busy as stream-K does, so that the schedule alone gives little. Transformers compile for each length, and are left out, by design, of prompts of more than 8192 tokens.",
		tables: []string{"Figure 12", "Figure 12, Phi-3-medium"}, head: "prompt and tokens", contenders: true,
		columns: []column{{head: "prompt, ms", metric: measure.PromptMillis, form: "3"}, {head: "ms a step", metric: measure.StepMillis}, {head: "s in all", metric: measure.TotalSeconds}, {head: headFixed, metric: measure.OverFixed}, {head: "x transformers, compiled", metric: measure.OverCompiled}},
		picture: picture{kind: "bars", x: "how many times as fast as", y: "prompt", bar: 1, series: []column{
			{head: "fixed split" + onOurKernel, who: lean, metric: measure.OverFixed, tint: 4}, {head: "transformers, compiled", who: lean, metric: measure.OverCompiled, tint: 2}}},
	},
}
