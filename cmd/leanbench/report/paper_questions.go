package report

import (
	"regexp"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// The sections of docs/paper.md: one per figure of the paper.

const (
	// publishedBy precedes the names of the paper's GPUs in the report with the paper's numbers. That report
	// uses the tables, cases and metrics of the measurements here.
	publishedBy = "LeanAttention, "

	// SameSpeed is the smallest ratio that rounds to 1.00.
	SameSpeed = 0.995

	// tableScale is the scale command's table of attention.
	tableScale = "Attention of a decode step with its heads or contexts on several GPUs, all in float16, pages of 64, recorded"

	// PaperAll is the table that summarizes all figures of a machine.
	PaperAll = "All figures of one device"

	lean, attend         = "lean", "lean, Attend" // leanattention on a GPU and on cores
	fixedSplit, perHead  = "lean, fixed split", "lean, per head"
	flashDecoding, cuDNN = "PyTorch, FLASH_ATTENTION", "PyTorch, CUDNN_ATTENTION"
	flashVarlen          = flashDecoding + ", varlen"
	flashInfer           = "FlashInfer, pages of 16"
	flashInferCores      = "FlashInfer on tensor cores, pages of 16"
	flashInferBatch      = "FlashInfer, BatchAttention, pages of 16"
	compiled             = "transformers, compiled"
	onOurKernel          = ", our kernel"
	headFixed, headHeads = "x fixed split", "x per head"
)

// paperColumns are the ratios and shares of a shape: first on a GPU, then on cores.
var paperColumns = []column{
	{head: "of the ceiling", who: lean, metric: ofCeiling},
	{head: "x FlashDecoding", who: lean, metric: measure.OverFlash, form: "f2"}, {head: "x FLASH, varlen", who: lean, metric: measure.OverVarlen, form: "f2"},
	{head: "x FlashInfer", who: lean, metric: measure.OverInfer, form: "f2"}, {head: "x cuDNN", who: lean, metric: measure.OverCUDNN, form: "f2"},
	{head: "of the ceiling", who: attend, metric: measure.Share},
	{head: "x default node", who: attend, metric: measure.OverStock, form: "f2"}, {head: "x PyTorch", who: attend, metric: measure.OverTorch, form: "f2"},
	{head: headFixed, who: lean, metric: measure.OverFixed, form: "f2"}, {head: headHeads, who: lean, metric: measure.OverPerHead, form: "f2"},
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

// Patterns that find the varying number in a case.
var (
	byContext   = regexp.MustCompile(`^(?P<series>)b\d+, [\d/]+ heads x (?P<row>\d+) x \d+$`)
	byHeads     = regexp.MustCompile(`^(?P<series>)b\d+, (?P<row>\d+) heads x \d+ x \d+$`)
	bySequences = regexp.MustCompile(`^(?P<series>)b(?P<row>\d+), \d+ heads x \d+ x \d+$`)
)

// along returns a question whose shapes differ in one number.
func along(id, title, text, x string, split *regexp.Regexp) question {
	return question{
		id: id, title: title, text: text, tables: []string{"Figure " + id}, head: x, split: split, columns: paperColumns,
		picture: picture{kind: "lines", x: x, y: "how many times as fast as", logX: true, ticks: true, bar: 1, series: paperSeries},
	}
}

// listed returns a question whose shapes have names.
func listed(id, title, text, table string) question {
	return question{
		id: id, title: title, text: text, tables: []string{table}, head: "shape", columns: paperColumns,
		picture: picture{kind: "bars", x: "how many times as fast as", y: "shape", bar: 1, series: paperSeries},
	}
}

// scaled returns a question about the scale command's measurements of shapes that are split by heads or by
// context.
func scaled(id, title, text string, bar float64, cases string) question {
	return question{
		id: id, title: title, text: text, tables: []string{tableScale}, head: "shape", only: regexp.MustCompile(cases),
		columns: slices.Concat([]column{{head: "one GPU: x FlashDecoding", who: "one GPU", metric: measure.OverFlash}}, severalGPUs("2 GPUs", ""), severalGPUs("4 GPUs", "")),
		picture: picture{kind: "bars", x: "how many times as fast", y: "shape", bar: bar, series: []column{
			{head: "2 GPUs: as one GPU", who: "2 GPUs", metric: measure.OverOneGPU, tint: 6}, {head: "4 GPUs: as one GPU", who: "4 GPUs", metric: measure.OverOneGPU, tint: 7},
			{head: "2 GPUs: as FlashDecoding", who: "2 GPUs", metric: measure.OverFlash, tint: 2}, {head: "4 GPUs: as FlashDecoding", who: "4 GPUs", metric: measure.OverFlash, tint: 1}}},
	}
}

// severalGPUs returns the columns of a number of GPUs for one series of cases.
func severalGPUs(who, series string) []column {
	head := who
	if series != "" {
		head = series + " heads"
	}
	return []column{
		{head: head + ": x one GPU", series: series, who: who, metric: measure.OverOneGPU}, {head: head + ": x FlashDecoding", series: series, who: who, metric: measure.OverFlash},
	}
}

var paperQuestions = []question{
	{
		id: "3", title: "Figure 3: how busy the multiprocessors are",
		text:   "One sequence, 56 heads of 64, 1024 to 65536 tokens. The paper counts FlashDecoding's 56 output tiles on 108 multiprocessors. \"By the schedule\" is the share of the multiprocessors' time in which the schedule assigns LeanTiles. \"Counted\" is the share in which a multiprocessor has a warp, by the GPU's counters (NVML). Idle multiprocessors leave bandwidth to the others, so the share of the ceiling differs from both.",
		tables: []string{"Figure 3"}, head: "context, tokens", split: byContext, contenders: true,
		columns: []column{
			{head: "by the schedule", who: lean, metric: measure.BusyShare}, {head: "fixed split: by the schedule", who: fixedSplit, metric: measure.BusyShare}, {head: "per head: by the schedule", who: perHead, metric: measure.BusyShare},
			{head: "counted", who: lean, metric: measure.BusyCounted}, {head: "FlashDecoding: counted", who: flashDecoding, metric: measure.BusyCounted},
			{head: "of the ceiling", who: lean, metric: ofCeiling}, {head: "FlashDecoding: of the ceiling", who: flashDecoding, metric: ofCeiling},
		},
		picture: picture{kind: "lines", x: "context, tokens", y: "share of the read ceiling, %", logX: true, ticks: true, percent: true, series: []column{
			{head: "ours", who: lean, metric: ofCeiling, tint: 7}, {head: "fixed split" + onOurKernel, who: fixedSplit, metric: ofCeiling, tint: 4}, {head: "per head" + onOurKernel, who: perHead, metric: ofCeiling, tint: 6},
			{head: "FlashDecoding", who: flashDecoding, metric: ofCeiling, tint: 1}, {head: "cuDNN", who: cuDNN, metric: ofCeiling, tint: 3},
			{head: "FlashInfer", who: flashInfer, metric: ofCeiling, tint: 2}}},
	},
	along("7a", "Figure 7a: contexts", "4 sequences, 32 heads of 64, 1024 to 262144 tokens (CPU: 256 to 16384). The paper, on an A100, is near 2 over FlashDecoding for short contexts and 2.18 at 262144 tokens.", "context, tokens", byContext),
	along("7b", "Figure 7b: heads", "Heads of 64; 8 to 64 heads, 4 sequences of 262144 tokens (CPU: 1 to 32 heads, one sequence of 16384). The paper gains more than 2 over FlashDecoding above 24 heads.", "heads", byHeads),
	along("7c", "Figure 7c: sequences", "32 heads of 64, 65536 tokens, 1 to 32 sequences (CPU: 12 heads, 4096 tokens, up to 16); the paper does not state its shapes. The paper gains more than 1.5 over FlashDecoding above 4 sequences.", "sequences", bySequences),
	along("8a", "Figure 8a: contexts", "6 sequences, 48 heads of 64. The paper, on an H100, is 2.52 over FlashDecoding and 4.48 over FlashInfer at 65536 tokens.", "context, tokens", byContext),
	along("8b", "Figure 8b: heads", "6 sequences of 65536 tokens, heads of 64.", "heads", byHeads),
	along("8c", "Figure 8c: sequences", "48 heads of 64, 65536 tokens; the paper states neither.", "sequences", bySequences),
	listed("peaks", "Where the paper gains most", "The shapes for which the paper reports its largest speedups.", "Figures 7 and 8, where the paper gains most"),
	listed("10", "Figure 10: contexts of several lengths", "One sequence has the largest length and the others are equal; the average length is a share of the largest. GPU: pages of 16; \"FLASH, varlen\" is PyTorch's kernel for such batches, without splits. CPU: PyTorch and the default nodes attend to one sequence after the other.", "Figure 10"),
	listed("10suites", "Ragged batches of other projects", "The batches of hpc-ops' dynamic schedule and of FlashInfer's paper (16 sequences, quantiles in place of random lengths).", "Figure 10, suites of other projects"),
	listed("11", "Figure 11: heads of 128", "Three models. The paper reports 1.34 over FlashDecoding at 8192 tokens and 3.5 at 131072, without model or batch.", "Figure 11"),
	{
		id: "13", title: "Figure 13: energy",
		text:   "Energy of the whole GPU by NVML's counter, in turns; pictures: mJ for each GB of keys and values. The paper draws ratios to FlashDecoding for one sequence with 56 heads of 64, without numbers. Bar: 80% of FlashDecoding's energy, for one sequence from 131072 tokens on and for several. Reading alone is the bound.",
		tables: []string{"Figure 13", "Figure 13, other shapes"}, head: "shape",
		columns: []column{{head: "of the ceiling's energy", who: lean, metric: measure.OfReadJoules, form: "f2"}, {head: "of FlashDecoding's", who: lean, metric: measure.OfFlashJoules, form: "f2"}},
		picture: picture{kind: "bars", x: "mJ for each GB of keys and values", y: "shape", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: measure.ByteJoules, tint: 6}, {head: "ours", who: lean, metric: measure.ByteJoules, tint: 7},
			{head: "FlashDecoding", who: flashDecoding, metric: measure.ByteJoules, tint: 1}, {head: "cuDNN", who: cuDNN, metric: measure.ByteJoules, tint: 3},
			{head: "FlashInfer", who: flashInfer, metric: measure.ByteJoules, tint: 2}, {head: "FlashInfer, tensor cores", who: flashInferCores, metric: measure.ByteJoules, tint: 5},
			{head: "FlashInfer, BatchAttention", who: flashInferBatch, metric: measure.ByteJoules, tint: 4}}},
	},
	{
		id: "9", title: "Figure 9: several GPUs",
		text:   "4 sequences, heads of 64 split over the GPUs, a recorded step, pages of 64. The paper gains more than 2 over FlashDecoding's schedule with 256 heads on 8 A100. Here each GPU schedules its own heads.",
		tables: []string{"Figure 9"}, head: "shape", contenders: true,
		columns: []column{
			{head: "one GPU: " + headFixed, who: "one GPU", metric: measure.OverFixed}, {head: "2 GPUs: x one GPU", who: "2 GPUs", metric: measure.OverOneGPU}, {head: "2 GPUs: " + headFixed, who: "2 GPUs", metric: measure.OverFixed},
			{head: "4 GPUs: x one GPU", who: "4 GPUs", metric: measure.OverOneGPU}, {head: "4 GPUs: " + headFixed, who: "4 GPUs", metric: measure.OverFixed},
			{head: "8 GPUs: x one GPU", who: "8 GPUs", metric: measure.OverOneGPU}, {head: "8 GPUs: " + headFixed, who: "8 GPUs", metric: measure.OverFixed},
		},
		picture: picture{kind: "bars", x: "GB/s of keys and values", y: "shape", series: []column{
			{head: "one GPU", who: "one GPU", metric: measure.Speed, tint: 6}, {head: "2 GPUs", who: "2 GPUs", metric: measure.Speed, tint: 1},
			{head: "4 GPUs", who: "4 GPUs", metric: measure.Speed, tint: 3}, {head: "8 GPUs", who: "8 GPUs", metric: measure.Speed, tint: 4},
			{head: "2 GPUs, FlashDecoding", who: "2 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 5}, {head: "4 GPUs, FlashDecoding", who: "4 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 2},
			{head: "8 GPUs, FlashDecoding", who: "8 GPUs, FLASH_ATTENTION", metric: measure.Speed, tint: 7}}},
	},
	{
		id: "9contexts", title: "Figure 9: four GPUs, by contexts",
		text:   "`leanbench scale -gpus 2,4 -match '^b4,' -python PYTHON`: 4 sequences, heads of 64, 1024 to 1048576 tokens, four GPUs. FlashDecoding has a quarter of the heads on one GPU, without fork and join. Bars: 3.8 times one GPU (dashed), and 2 times FlashDecoding with 256 heads. With few output tiles FlashDecoding splits contexts; with 256 output tiles a GPU, FlashDecoding splits nothing and reads at half of the speed.",
		tables: []string{tableScale}, head: "context, tokens", only: regexp.MustCompile(`^b4, \d+ heads `),
		split:   regexp.MustCompile(`^b4, (?P<series>\d+) heads x (?P<row>\d+) x 64$`),
		columns: slices.Concat(severalGPUs("4 GPUs", "64"), severalGPUs("4 GPUs", "128"), severalGPUs("4 GPUs", "160"), severalGPUs("4 GPUs", "256")),
		picture: picture{kind: "lines", x: "context, tokens", y: "how many times as fast as", logX: true, ticks: true, bar: 3.8, series: []column{
			{head: "64 heads, one GPU", series: "64", who: "4 GPUs", metric: measure.OverOneGPU, tint: 6}, {head: "256 heads, one GPU", series: "256", who: "4 GPUs", metric: measure.OverOneGPU, tint: 7},
			{head: "64 heads, FlashDecoding", series: "64", who: "4 GPUs", metric: measure.OverFlash, tint: 2}, {head: "256 heads, FlashDecoding", series: "256", who: "4 GPUs", metric: measure.OverFlash, tint: 1}}},
	},
	scaled("9heads", "Long sequences on four GPUs by heads",
		"`leanbench scale -gpus 2,4 -match '^b(1|6|16),' -python PYTHON`. KV heads are split over the GPUs. Bars: 3.8 times one GPU on four GPUs (dashed); 1.95 on two, for some shapes. A step forks and joins once: 14 to 18 us on four GPUs. Steps have eight layers, fewer where eight exceed 20 GB, and one with 4194304 tokens. FlashDecoding is ahead with 64 tokens.",
		3.8, `^b[16], (48|64/8) heads `),
	scaled("9context", "Long sequences on four GPUs by context",
		"The same run. Each GPU attends to a part of each context with all heads; one launch exchanges and merges the states. Bars from 1048576 tokens on: 3.6 times one GPU on four GPUs (dashed), 1.85 on two for some shapes. For 4194304 tokens and one KV head, four GPUs take 20 us more than one GPU for a quarter; the bar leaves 2 us. FlashDecoding has a part of the context and merges nothing, and is ahead with 512 tokens and with 16 sequences of 32/1 heads of 128.",
		3.6, `^b\d+, (1|\d+/1) heads |, by context$`),
	{
		id: "12", title: "Figure 12: end to end",
		text:   "One sequence: a prompt, then an eighth as many tokens. The paper decodes Phi-3-medium in ONNX Runtime: 1.12 over FlashDecoding for the first 1024 tokens, 1.73 over FlashAttention-2 on average above 16384. Here the shapes of OPT-6.7b and Phi-3-medium have random weights, and a step in the middle of the tokens counts for all. Fixed split has 8 splits, which keep the memory busy. transformers compile for each length: up to 8192 tokens.",
		tables: []string{"Figure 12", "Figure 12, Phi-3-medium"}, head: "prompt and tokens", contenders: true,
		columns: []column{{head: headFixed, who: lean, metric: measure.OverFixed}, {head: "x transformers, compiled", who: lean, metric: measure.OverCompiled}},
		picture: picture{kind: "bars", x: "how many times as fast as", y: "prompt", bar: 1, series: []column{
			{head: "fixed split" + onOurKernel, who: lean, metric: measure.OverFixed, tint: 4}, {head: "transformers, compiled", who: lean, metric: measure.OverCompiled, tint: 2}}},
	},
}
