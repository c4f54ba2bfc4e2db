package report

import (
	"regexp"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// question is a section of the page: a table and a picture.
type question struct {
	id, title, text string
	tables          []string // source of the table's figures
	head            string   // head of the first column
	contenders      bool     // one line per contender instead of per case
	split           *regexp.Regexp
	only            *regexp.Regexp // filters cases
	some            *regexp.Regexp // filters the table's lines; the picture shows all lines
	name            *regexp.Regexp // matches a table's name; the first group precedes the table's cases
	columns         []column
	points          string // a table that only the picture shows
	picture         picture
}

// column is a column of a table, or a series of a picture.
type column struct {
	head   string
	series string // the part of the case that split captures
	who    string
	metric measure.Metric
	form   string
	tint   int // number of the series' colour; 0: by position
	dashed bool
}

// picture is how the figures of a question are drawn.
type picture struct {
	kind       string // bars from zero, dots, lines, or points over the time of a launch
	x, y       string // axis titles, with units
	logX, logY bool
	ticks      bool // of lines: x ticks are at the figures
	percent    bool
	bar        float64 // position of a line that marks the bar
	rows       *regexp.Regexp
	series     []column
}

// Short names of metrics that several columns share.
const (
	ofCeiling = measure.GPUShare
	us        = measure.Micros
	overBest  = measure.OverBest
)

func shares(list ...string) (all []column) {
	for i := 0; i+1 < len(list); i += 2 {
		all = append(all, column{head: list[i], who: list[i+1], metric: measure.Share})
	}
	return all
}

var contextSplit = regexp.MustCompile(`^(?P<series>\w+), 12 heads x (?P<row>\d+) x 64$`)

// everyThird matches every third context of a sweep.
var everyThird = regexp.MustCompile(`^(128|1024|8192|65536)$`)

var questions = []question{
	{
		id: "cpu-memory", title: "Keys and values from memory, on a CPU",
		text:   "One query for each head; keys and values of 256 MB and more. The node is `Attend` in a Gorgonia graph; default is three of Gorgonia's own nodes. Bars: 90% of the read ceiling in float32, 85% in 16 bits, 80% for grouped queries. The picture has heads of 64.",
		tables: []string{"Keys and values of 256 MB and more"}, head: "type, heads x context x d", some: regexp.MustCompile(` x 128$`),
		columns: append([]column{{head: "read ceiling, GB/s", who: measure.ReadCeiling, metric: measure.Speed}}, append(shares("Attend", "lean, Attend", "node", "lean, node"),
			column{head: "Attend x default", who: "lean, Attend", metric: measure.OverStock}, column{head: "node x default", who: "lean, node", metric: measure.OverStock})...),
		picture: picture{kind: "bars", x: "share of the read ceiling, %", y: "type, heads x context x d", percent: true, series: shares("Attend", "lean, Attend", "node", "lean, node")},
	},
	{
		id: "cpu-cache", title: "Keys and values in the cache of a CPU",
		text:   "12 heads x 1024 x 64, the same operands in every step. The difference between node and `Attend` is the tape machine. Bars: 8 times the default node, and no allocation by `Attend`.",
		tables: []string{"12 heads x 1024 x 64, the same keys and values in every step"}, head: "type, heads x context x d",
		columns: []column{
			{head: "read ceiling, GB/s", who: measure.ReadCeiling, metric: measure.Speed},
			{head: "Attend, GB/s", who: "lean, Attend", metric: measure.Speed}, {head: "node, GB/s", who: "lean, node", metric: measure.Speed},
			{head: "Attend x default", who: "lean, Attend", metric: measure.OverStock}, {head: "node x default", who: "lean, node", metric: measure.OverStock}, {head: "allocations, Attend", who: "lean, Attend", metric: measure.Allocs},
		},
		picture: picture{kind: "bars", x: "GB/s", y: "type, heads x context x d", series: []column{
			{head: "Attend", who: "lean, Attend", metric: measure.Speed}, {head: "node", who: "lean, node", metric: measure.Speed}, {head: "default node", who: "default node", metric: measure.Speed}}},
	},
	{
		id: "cpu-contexts", title: "Contexts of 128 to 65536 tokens, on a CPU",
		text:   "12 heads of 64, keys and values from memory: `Attend` (A) and the node (N) as shares of the read ceiling, and float32 speedups over the default node.",
		tables: []string{"Contexts, 12 heads of 64, keys and values from memory"}, head: "context", split: contextSplit, some: everyThird,
		columns: []column{
			{head: "f32: A", series: "f32", who: "lean, Attend", metric: measure.Share}, {head: "N", series: "f32", who: "lean, node", metric: measure.Share},
			{head: "A x default", series: "f32", who: "lean, Attend", metric: measure.OverStock}, {head: "N x default", series: "f32", who: "lean, node", metric: measure.OverStock},
			{head: "f16: A", series: "f16", who: "lean, Attend", metric: measure.Share}, {head: "N", series: "f16", who: "lean, node", metric: measure.Share},
			{head: "bf16: A", series: "bf16", who: "lean, Attend", metric: measure.Share}, {head: "N", series: "bf16", who: "lean, node", metric: measure.Share},
		},
		picture: picture{kind: "lines", x: "context, tokens", y: "share of the read ceiling, %", logX: true, percent: true, series: []column{
			{head: "f32, Attend", series: "f32", who: "lean, Attend", metric: measure.Share}, {head: "f32, node", series: "f32", who: "lean, node", metric: measure.Share},
			{head: "f16, Attend", series: "f16", who: "lean, Attend", metric: measure.Share}, {head: "bf16, Attend", series: "bf16", who: "lean, Attend", metric: measure.Share}, {head: "default node", series: "f32", who: "default node", metric: measure.Share}}},
	},
	{
		id: "decode", title: "Against Gorgonia's own nodes",
		text:   "One query of 12 heads of 64 over n tokens, in us. Every step has the same operands, so short contexts are in the cache.",
		tables: []string{"BenchmarkDecode"}, head: "n", some: everyThird, split: regexp.MustCompile(`^h12n(?P<row>\d+)d64(?P<series>)$`),
		columns: []column{
			{head: "default", who: "default", metric: "ns/op", form: "us"}, {head: "node, f32", who: "lean", metric: "ns/op", form: "us"}, {head: "node, f16", who: "lean-f16", metric: "ns/op", form: "us"},
			{head: "node, bf16", who: "lean-bf16", metric: "ns/op", form: "us"}, {head: "Attend, f32", who: "attend", metric: "ns/op", form: "us"},
			{head: "allocations: default", who: "default", metric: "allocs/op", form: "f0"}, {head: "node", who: "lean", metric: "allocs/op", form: "f0"},
		},
		picture: picture{kind: "lines", x: "context, tokens", y: "time of a step, ns", logX: true, logY: true, series: []column{
			{head: "default", who: "default", metric: "ns/op"}, {head: "node, f32", who: "lean", metric: "ns/op"}, {head: "node, f16", who: "lean-f16", metric: "ns/op"}, {head: "Attend, f32", who: "attend", metric: "ns/op"}}},
	},
	{
		id: "peers", title: "Against PyTorch, on a CPU",
		text:   "`scaled_dot_product_attention` with as many threads, queries in the type of keys and values. \"Packed\" passes the query heads of a group as queries of one head. Bars, float32: 1.4 times PyTorch from memory, 1.0 in the cache, 4 for grouped queries; float16 2.2; bfloat16 7.",
		tables: []string{"One query a head, against scaled_dot_product_attention"}, head: "heads x context x d", split: regexp.MustCompile(`^(?P<series>\w+), (?P<row>.*)$`), some: regexp.MustCompile(` x (1024|65536) x `),
		columns: append(append(torch("f32", column{head: "f32: packed", series: "f32", who: "PyTorch, groups packed by hand", metric: measure.Speed}), torch("f16")...), torch("bf16")...),
		picture: picture{kind: "bars", x: "times PyTorch's speed", y: "heads x context x d", bar: 1, series: []column{
			{head: "f32", series: "f32", who: "lean, Attend", metric: measure.OverTorch}, {head: "f16", series: "f16", who: "lean, Attend", metric: measure.OverTorch}, {head: "bf16", series: "bf16", who: "lean, Attend", metric: measure.OverTorch}}},
	},
	{
		id: "forks", title: "Forks, on a CPU",
		text:   "A decode step of forks, which read shared tokens once, against sequences with copies. The ceiling reads distinct bytes. Bar: at least as fast as copies.",
		tables: []string{"A token of each of several forks"}, head: "", split: regexp.MustCompile(`^(?P<series>\w+), (?P<row>.*)$`),
		columns: slices.Concat(forks("f32"), forks("f16")),
		picture: picture{kind: "bars", x: "times the speed of copies", y: "sequences", bar: 1, series: []column{
			{head: "f32", series: "f32", who: "forks", metric: measure.OverCopies}, {head: "f16", series: "f16", who: "forks", metric: measure.OverCopies}}},
	},
	{
		id: "scores", title: "What score modifications cost, on a CPU",
		text:   "Time relative to attention without the modification, float32: `Attend` with 12 heads of 64, and a training step at 1024 keys with the bias' own gradient.",
		tables: []string{"x the time without, Attend", "x the time without, a training step"}, head: "",
		columns: []column{
			{head: "1 query, 16384 keys", who: "lean", metric: "1 query, 16384 keys"}, {head: "1 query, 1024 keys, in cache", who: "lean", metric: "1 query, 1024 keys, in cache"},
			{head: "512 queries, causal", who: "lean", metric: "512 queries, causal"}, {head: "training step", who: "lean", metric: "1024 keys"},
		},
		picture: picture{kind: "bars", x: "time over that without", y: "score modification", series: []column{
			{head: "1 query, 16384 keys", who: "lean", metric: "1 query, 16384 keys"}, {head: "512 queries, causal", who: "lean", metric: "512 queries, causal"}, {head: "training step", who: "lean", metric: "1024 keys"}}},
	},
	{
		id: "e2e", title: "Whole decoders, on a CPU",
		text:   "Checkpoints with OPT-125m's shape, greedy, 2 threads. Bars: float32 1.25 times CTranslate2's; float16 twice transformers' float32 and as fast as CTranslate2's int8; 8 sequences 1.2 times CTranslate2's float32.",
		tables: []string{"One sequence, behind 64 tokens", "8 sequences, behind 1024 tokens each"}, head: "", contenders: true,
		columns: []column{
			{head: "tokens/s", metric: measure.Tokens}, {head: "of the prompt", metric: measure.Prompt}, {head: "x transformers", metric: measure.OverHF}, {head: "x CT2", metric: measure.OverCT2}, {head: "x CT2 int8", metric: measure.OverInt8},
		},
		picture: picture{kind: "bars", x: "tokens/s of all sequences", y: "sequences, decoder", series: []column{{head: "tokens/s", metric: measure.Tokens}}},
	},
	{
		id: "gpu-peers", title: "Against PyTorch's kernels, on a GPU",
		text:   "One query head a KV head, contiguous float16, all shapes that PyTorch takes: speedup over the better of cuDNN and FLASH_ATTENTION (FlashDecoding). Launches are in CUDA graphs, with operands beyond the L2 cache. Bars: geometric mean 1.10, least 1.00.",
		tables: []string{"Against PyTorch, by the time of our launch"}, head: "our launch", points: "Sweep",
		columns: []column{
			{head: "shapes", who: "lean", metric: "shapes", form: "f0"}, {head: "x the better, geometric mean", who: "lean", metric: "x best peer, geometric mean", form: "f3"}, {head: "least", who: "lean", metric: "x best peer, least", form: "f3"},
			{head: "x FLASH, geometric mean", who: "lean", metric: "x FLASH, geometric mean", form: "f2"}, {head: "least", who: "lean", metric: "x FLASH, least", form: "f3"},
		},
		picture: picture{kind: "points", x: "our launch, us", y: "times the better peer's speed", logX: true, bar: 1, series: []column{{head: "a shape", who: "lean", metric: overBest}}},
	},
	{
		id: "gpu-memory", title: "Of the memory's speed, on a GPU",
		text:   "The same shapes, with keys and values of 300 MB and more. The read ceiling copies the same bytes to shared memory. Bars: 98% with one query head a KV head, 90% for a single head.",
		tables: []string{"Of the memory's speed"}, head: "",
		columns: []column{
			{head: "shapes", who: "lean", metric: "shapes", form: "f0"}, {head: "reach their bar", who: "lean", metric: "reach the bar", form: "f0"},
			{head: "least", who: "lean", metric: "of the read ceiling, least", form: "%"}, {head: "median", who: "lean", metric: "of the read ceiling, median", form: "%"}, {head: "most", who: "lean", metric: "of the read ceiling, most", form: "%"},
		},
		picture: picture{kind: "points", x: "our launch, us", y: "share of the read ceiling, %", logX: true, percent: true, bar: 0.98, series: []column{{head: "a shape", who: "lean", metric: ofCeiling}}},
		points:  "Sweep",
	},
	{
		id: "gpu-pages", title: "Keys in pages, on a GPU",
		text:   "Speed with scattered pages of 16 and 64 tokens, relative to contiguous keys. A reader only reads the same pages. Bar: 97%.",
		tables: []string{"Pages"}, head: "contiguous launch, us", some: regexp.MustCompile(`(17 to 70|70 and more|all)$`),
		columns: []column{
			{head: "shapes", who: "pages of 16", metric: "shapes", form: "f0"},
			{head: "16: reach 97%", who: "pages of 16", metric: "reach 97%", form: "f0"}, {head: "median", who: "pages of 16", metric: "of contiguous, median", form: "%"}, {head: "least", who: "pages of 16", metric: "of contiguous, least", form: "%"}, {head: "reader, of the ceiling", who: "pages of 16", metric: "a reader of the same pages, of the ceiling", form: "%"},
			{head: "64: reach 97%", who: "pages of 64", metric: "reach 97%", form: "f0"}, {head: "median", who: "pages of 64", metric: "of contiguous, median", form: "%"}, {head: "least", who: "pages of 64", metric: "of contiguous, least", form: "%"},
		},
		picture: picture{kind: "dots", bar: 0.97, x: "speed over that with contiguous keys, %", y: "contiguous launch, us", percent: true, series: []column{
			{head: "pages of 16, median", who: "pages of 16", metric: "of contiguous, median"}, {head: "pages of 16, least", who: "pages of 16", metric: "of contiguous, least"},
			{head: "pages of 64, median", who: "pages of 64", metric: "of contiguous, median"}, {head: "pages of 64, least", who: "pages of 64", metric: "of contiguous, least"}}},
	},
	{
		id: "gpu-named", title: "Shapes by name, on a GPU",
		text:   "float16. Bars: b6 2.9 times FLASH_ATTENTION and 98% of the ceiling; others 7, 13 and 18 us; 1M keys 90% of the ceiling; pages 97%.",
		tables: []string{"Shapes by name"}, head: "batch, heads x context x d",
		columns: []column{
			{head: "us", who: "lean", metric: us, form: "f2"}, {head: "of the read ceiling", who: "lean", metric: ofCeiling}, {head: "x FLASH", who: "lean", metric: measure.OverFlash}, {head: "x best of FLASH and cuDNN", who: "lean", metric: overBest},
			{head: "pages of 16, of contiguous", who: "lean, pages of 16", metric: measure.OfDense}, {head: "pages of 64", who: "lean, pages of 64", metric: measure.OfDense},
		},
		picture: picture{kind: "bars", x: "times as fast", y: "batch, heads x context x d", series: []column{
			{head: "as FLASH_ATTENTION", who: "lean", metric: measure.OverFlash}, {head: "as the better of FLASH and cuDNN", who: "lean", metric: overBest}}},
	},
	{
		id: "gpu-ragged", title: "Ragged batches, on a GPU",
		text:   "Sequences of very different lengths, in pages. Bar: 1.05 times the ceiling's time plus 5 us.",
		tables: []string{"Ragged batches, in pages"}, head: "lengths, heads of d",
		columns: []column{
			{head: "ceiling, us", who: measure.ReadCeiling, metric: us}, {head: "pages of 16, us", who: "lean, pages of 16", metric: us}, {head: "of the ceiling", who: "lean, pages of 16", metric: ofCeiling}, {head: "of the time allowed", who: "lean, pages of 16", metric: measure.OfAllowed},
			{head: "pages of 64, us", who: "lean, pages of 64", metric: us}, {head: "of the ceiling", who: "lean, pages of 64", metric: ofCeiling}, {head: "of the time allowed", who: "lean, pages of 64", metric: measure.OfAllowed},
		},
		picture: picture{kind: "bars", x: "us", y: "lengths, heads of d", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: us}, {head: "pages of 16", who: "lean, pages of 16", metric: us}, {head: "pages of 64", who: "lean, pages of 64", metric: us}}},
	},
	{
		id: "flashinfer", title: "Against FlashInfer, on an H200",
		text:   "us, and speedup over the fastest of FlashInfer's kernels with pages of 16: `BatchDecodeWithPagedKVCacheWrapper` on CUDA cores and on tensor cores, and `BatchAttention`. Plans are not timed. Bars: A 3 times the better wrapper; B 1.2 times `BatchAttention`, which is above the ceiling.",
		tables: []string{"Ragged batches against FlashInfer, H200"}, head: "batch, heads x context x d",
		columns: flashinferColumns,
		picture: flashinferPicture,
	},
	{
		id: "flashinfer-h100", title: "Against FlashInfer, on an H100",
		text:   "104 shapes and three ragged batches: speedup over the fastest of FlashInfer's kernels, with pages of 16.",
		tables: []string{"Against FlashInfer, H100"}, head: "ours", some: regexp.MustCompile(`contiguous|with the ragged|below 7 us|300 us`),
		columns: []column{
			{head: "shapes", who: "lean", metric: "shapes", form: "f0"}, {head: "x the best, geometric mean", who: "lean", metric: "x best peer, geometric mean", form: "f3"}, {head: "least", who: "lean", metric: "x best peer, least", form: "f3"}, {head: "at least as fast on", who: "lean", metric: "at least as fast on", form: "f0"},
		},
		picture: picture{kind: "bars", x: "times as fast as the best of FlashInfer's, geometric mean", y: "ours", bar: 1, series: []column{{head: "H100", who: "lean", metric: "x best peer, geometric mean"}}},
	},
	{
		id: "flashinfer-h100-ragged", title: "Ragged batches against FlashInfer, on an H100",
		text:   "us; the bars are those of the H200. In A, FlashInfer's best has 44% of the ceiling, so a speedup of 2.25 is the most that is possible.",
		tables: []string{"Ragged batches against FlashInfer, H100"}, head: "lengths, heads of d",
		columns: append(flashinferColumns, column{head: "16 x BatchAttention", who: "lean, pages of 16", metric: measure.OverBatch}),
		picture: flashinferPicture,
	},
	{
		id: "gpu-groups", title: "Groups of query heads, on a GPU",
		text:   "The same keys and values with more query heads a KV head: us, and time relative to one query head. Bar: 103%.",
		tables: []string{"Grouped queries against one query head a KV head, the same keys and values"}, head: "batch, KV heads x context x d",
		columns: append([]column{{head: "1, us", who: "lean", metric: us}}, groups(measure.TimeOfMHA, "", "2", "4", "5", "7", "8", "16")...),
		picture: picture{kind: "dots", x: "time over that of one query head a KV head, %", y: "launch", percent: true, bar: 1.03, series: groups(measure.TimeOfMHA, " query heads", "2", "4", "8", "16")},
	},
	{
		id: "gpu-layer", title: "What a layer costs beyond its kernels",
		text:   "A layer of a decode step of 12 layers: keys and values in float16, pages of 64, the rest in float32; neighbouring nodes on the GPU (G) or on the host (H); us a layer.",
		tables: []string{"A layer of a decode step of 12, keys and values in float16 in pages of 64, the rest in float32"}, head: "batch, heads x context x d",
		columns: layerColumns,
		picture: picture{kind: "bars", x: "us a layer", y: "batch, heads x context x d", series: layerColumns[:3]},
	},
	{
		id: "e2e-gpu", title: "A decode step of OPT and Llama, on a GPU",
		text:   "float16, after 1024 tokens, greedy. transformers are compiled (`reduce-overhead`, `StaticCache`) and eager. One sequence is one launch. Bars over compiled, one and 16 sequences: 2.5 and 2 (125m), 2.2 and 1.6 (1.3b), 1.6 and 1.35 (6.7b); of the ceiling: 6.7b 88%, 1B 80%, 8B 92% and 85% (16).",
		tables: []string{"A decode step of OPT-125m in float16", "A decode step of OPT-1.3b in float16", "A decode step of OPT-6.7b in float16", "A decode step of Llama-3.2-1B in float16", "A decode step of Llama-3-8B in float16"}, head: "model, sequences",
		name: regexp.MustCompile(`step of (\S+) in`), only: regexp.MustCompile(`behind 1024 `), split: regexp.MustCompile(`^(?P<row>\S+, b\d+), behind 1024 tokens(?P<series>)$`),
		columns: []column{
			{head: "ceiling, ms", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean, ms", who: "lean", metric: measure.StepMillis}, {head: "of the ceiling", who: "lean", metric: ofCeiling},
			{head: "x compiled", who: "lean", metric: measure.OverCompiled, form: "f3"}, {head: "x eager", who: "lean", metric: measure.OverEager, form: "f1"},
		},
		picture: picture{kind: "bars", x: "ms a step", y: "model, sequences", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean", who: "lean", metric: measure.StepMillis}, {head: "transformers, compiled", who: "transformers, compiled", metric: measure.StepMillis}}},
	},
	{
		id: "e2e-batches", title: "A decode step of many sequences of OPT, on a GPU",
		text:   "The same with 32 sequences and more, when these layers were GEMMs that split x in two parts. Bars: 85% of the ceiling, 1.15 of compiled (for OPT-1.3b, b128 that is 95% of the ceiling).",
		tables: []string{"A decode step of many sequences of OPT-1.3b in float16", "A decode step of many sequences of OPT-6.7b in float16"}, head: "model, sequences",
		name: regexp.MustCompile(`(OPT-\S+) in`), split: regexp.MustCompile(`^(?P<row>OPT-\S+, b\d+), behind 1024 tokens(?P<series>)$`),
		columns: []column{
			{head: "ceiling, ms", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean, ms", who: "lean", metric: measure.StepMillis}, {head: "of the ceiling", who: "lean", metric: ofCeiling},
			{head: "x compiled", who: "lean", metric: measure.OverCompiled, form: "f2"},
		},
		picture: picture{kind: "bars", x: "ms a step", y: "model, sequences", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean", who: "lean", metric: measure.StepMillis}, {head: "transformers, compiled", who: "transformers, compiled", metric: measure.StepMillis}}},
	},
	{
		id: "gpu-linear", title: "Linear layers of many rows, on a GPU",
		text:   "float16 weights. x and y are float32 here and float16 for PyTorch (cuBLAS). Our time includes the launch that converts x to 16 bits. Bars: 0.80 in mixed precision, 0.42 in two parts.",
		tables: []string{"Linear layers of many rows"}, head: "rows x in to out", only: regexp.MustCompile(`^2048 x `),
		columns: []column{
			{head: "cuBLAS, TFLOP/s", who: "PyTorch, cuBLAS", metric: measure.TFLOPs, form: "f0"},
			{head: "two parts, x cuBLAS", who: "lean", metric: measure.OverCuBLAS, form: "f2"}, {head: "mixed, x cuBLAS", who: "lean, mixed precision", metric: measure.OverCuBLAS, form: "f2"},
		},
		picture: picture{kind: "bars", x: "TFLOP/s", y: "rows x in to out", series: []column{
			{head: "two parts", who: "lean", metric: measure.TFLOPs}, {head: "mixed precision", who: "lean, mixed precision", metric: measure.TFLOPs}, {head: "cuBLAS", who: "PyTorch, cuBLAS", metric: measure.TFLOPs}}},
	},
	{
		id: "e2e-gpu-long", title: "Long contexts of OPT-6.7b, on a GPU",
		text:   "One sequence, in turn with FlashDecoding's schedule (fixed: 8 splits) and with attention in three launches (default). All heads have one length, so a fixed split is as good.",
		tables: []string{"A decode step of OPT-6.7b in float16"}, head: "", only: regexp.MustCompile(`behind (8192|32768) `),
		columns: []column{
			{head: "ceiling, ms", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean, ms", who: "lean", metric: measure.StepMillis}, {head: "of the ceiling", who: "lean", metric: ofCeiling},
			{head: "fixed, ms", who: "fixed", metric: measure.StepMillis}, {head: "default, ms", who: "default", metric: measure.StepMillis}, {head: "x fixed", who: "lean", metric: measure.OverFixed}, {head: "x default", who: "lean", metric: measure.OverDefault},
		},
		picture: picture{kind: "bars", x: "ms a step", y: "context", series: []column{
			{head: "read ceiling", who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "lean", who: "lean", metric: measure.StepMillis}, {head: "default", who: "default", metric: measure.StepMillis}}},
	},
	{
		id: "gpu-prompts", title: "Attention of prompts, on a GPU",
		text:   "16384 tokens in all, float16, in turn with PyTorch's kernels. The float32 column has float32 queries, outputs and accuracy, in twice the products. Bars: 0.80 of cuDNN (not causal 0.85), 1.3 times FLASH, 0.40 with float32; pages of 16 90% and of 64 95% of contiguous. 16 x 1024 misses with heads of 64: the last output tile has 64 of 192 rows.",
		tables: []string{"Prompts", "All causal prompts, geometric mean"}, head: "prompts",
		columns: []column{
			{head: "TFLOP/s", who: "lean", metric: measure.TFLOPs, form: "f0"},
			{head: "x cuDNN", who: "lean", metric: measure.OverCUDNN, form: "f2"}, {head: "x FLASH", who: "lean", metric: measure.OverFlash, form: "f2"}, {head: "float32, x cuDNN", who: "lean, float32 queries and outputs", metric: measure.OverCUDNN, form: "f2"},
			{head: "pages of 16", who: "lean, pages of 16", metric: measure.OfDense}, {head: "of 64", who: "lean, pages of 64", metric: measure.OfDense},
		},
		picture: picture{kind: "bars", x: "TFLOP/s", y: "prompts", series: []column{
			{head: "lean", who: "lean", metric: measure.TFLOPs}, {head: "cuDNN", who: "PyTorch, CUDNN_ATTENTION", metric: measure.TFLOPs}, {head: "FLASH", who: "PyTorch, FLASH_ATTENTION", metric: measure.TFLOPs}}},
	},
	{
		id: "gpu-chunks", title: "Chunks of prompts behind earlier tokens, on a GPU",
		text:   "PyTorch's cuDNN has no mask for chunks, and computes all scores. Bars: 0.80 of the better peer; a chunk beside single tokens takes at most 1.05 times (the longer plus 20% of the other).",
		tables: []string{"Chunks of prompts behind earlier tokens", "A chunk of a prompt and single tokens in one step"}, head: "chunks",
		columns: []column{
			{head: "us", who: "lean", metric: us, form: "f0"}, {head: "float32, us", who: "lean, float32 queries and outputs", metric: us, form: "f0"},
			{head: "x the better", who: "lean", metric: overBest, form: "f2"}, {head: "pages of 16", who: "lean, pages of 16", metric: measure.OfDense}, {head: "of 64", who: "lean, pages of 64", metric: measure.OfDense},
			{head: "of the time allowed", who: "lean", metric: measure.OfSum},
		},
		picture: picture{kind: "bars", x: "us", y: "chunks", series: []column{{head: "lean", who: "lean", metric: us}, {head: "FLASH", who: "PyTorch, FLASH_ATTENTION", metric: us}}},
	},
	{
		id: "e2e-prompts", title: "Prompts of OPT, on a GPU",
		text:   "float16, up to 2048 tokens at once, until the next tokens are there; transformers (float16, sdpa) in turn. Without mixed precision, products keep float32's accuracy at twice the arithmetic. The first prompt of a process loads kernels. Bar: 0.85 of transformers with OPT-6.7b, mixed.",
		tables: []string{"Prompts of OPT-1.3b in float16", "Prompts of OPT-6.7b in float16"}, head: "model, prompts",
		name: regexp.MustCompile(`(OPT-\S+) in`),
		columns: []column{
			{head: "tokens/s", who: "lean", metric: measure.Prompt, form: "f0"}, {head: "mixed precision", who: "lean, mixed precision", metric: measure.Prompt, form: "f0"}, {head: "transformers", who: "transformers", metric: measure.Prompt, form: "f0"},
			{head: "x transformers", who: "lean", metric: measure.OverHF, form: "f2"}, {head: "mixed", who: "lean, mixed precision", metric: measure.OverHF, form: "f2"},
			{head: "mixed, ms", who: "lean, mixed precision", metric: measure.PromptMillis, form: "f0"}, {head: "the first, ms", who: "lean", metric: measure.FirstPrompt, form: "f0"},
		},
		picture: picture{kind: "bars", x: "tokens/s", y: "model, prompts", series: []column{{head: "lean", who: "lean", metric: measure.Prompt}, {head: "mixed precision", who: "lean, mixed precision", metric: measure.Prompt}, {head: "transformers", who: "transformers", metric: measure.Prompt}}},
	},
	{
		id: "gpu-sample", title: "Choosing tokens, on a GPU",
		text:   "From logits over a vocabulary of 50272, in us.",
		tables: []string{"Choosing tokens from a vocabulary of 50272"}, head: "",
		columns: rowsOf("1 row", "16 rows", "64 rows"),
		picture: picture{kind: "bars", x: "us", y: "how a token is chosen", series: rowsOf("1 row", "16 rows", "64 rows")},
	},
	{
		id: "first-token", title: "The first token, on a GPU",
		text:   "Seconds from the start of the command.",
		tables: []string{"The first token"}, head: "",
		columns: []column{{head: "all", who: "all", metric: "s"}, {head: "loading", who: "loading", metric: "s"}, {head: "graphs and copies of weights", who: "graphs and copies of weights", metric: "s"}, {head: "the prompt", who: "the prompt", metric: "s"}},
		picture: picture{kind: "bars", x: "s", y: "model", series: []column{{head: "all", who: "all", metric: "s"}, {head: "loading", who: "loading", metric: "s"}, {head: "graphs and copies", who: "graphs and copies of weights", metric: "s"}}},
	},
}

func rowsOf(names ...string) (all []column) {
	for _, n := range names {
		all = append(all, column{head: n, who: n, metric: us})
	}
	return all
}

// forks returns the columns of an element type: the times of a step, and the speedup over copies.
func forks(store string) []column {
	return []column{
		{head: store + ": ceiling, ms", series: store, who: measure.ReadCeiling, metric: measure.StepMillis}, {head: "forks, ms", series: store, who: "forks", metric: measure.StepMillis},
		{head: "x copies", series: store, who: "forks", metric: measure.OverCopies},
	}
}

// torch returns the columns of an element type: the speed in GB/s, and the speedup over PyTorch.
func torch(store string, more ...column) []column {
	all := []column{
		{head: store + ": lean, GB/s", series: store, who: "lean, Attend", metric: measure.Speed}, {head: "x PyTorch", series: store, who: "lean, Attend", metric: measure.OverTorch},
	}
	return append(all, more...)
}

// groups returns the columns of a metric for launches with the given numbers of query heads per KV head.
func groups(m measure.Metric, what string, sizes ...string) (all []column) {
	for _, n := range sizes {
		all = append(all, column{head: n + what, who: "lean, groups of " + n, metric: m})
	}
	return all
}

var layerColumns = []column{
	{head: "kernels, in a graph", who: "kernels, in a graph", metric: measure.LayerMicros}, {head: "G: driver alone", who: "driver alone, neighbours on the GPU", metric: measure.LayerMicros}, {head: "G: lean", who: "lean, neighbours on the GPU", metric: measure.LayerMicros},
	{head: "beyond the driver", who: "lean, neighbours on the GPU", metric: measure.BeyondFloor}, {head: "H: driver alone", who: "driver alone, neighbours on the host", metric: measure.LayerMicros}, {head: "H: lean", who: "lean, neighbours on the host", metric: measure.LayerMicros},
	{head: "beyond the driver", who: "lean, neighbours on the host", metric: measure.BeyondFloor}, {head: "Set and Rollback", who: "of it Set and Rollback", metric: measure.LayerMicros},
}

var flashinferColumns = []column{
	{head: "ceiling", who: measure.ReadCeiling, metric: us}, {head: "lean, 16", who: "lean, pages of 16", metric: us}, {head: "lean, 64", who: "lean, pages of 64", metric: us},
	{head: "16 x the best", who: "lean, pages of 16", metric: overBest}, {head: "64", who: "lean, pages of 64", metric: overBest},
}

var flashinferPicture = picture{kind: "bars", x: "times as fast as the best of FlashInfer's", y: "batch, heads x context x d", bar: 1, series: []column{
	{head: "pages of 16", who: "lean, pages of 16", metric: overBest}, {head: "pages of 64", who: "lean, pages of 64", metric: overBest}}}
