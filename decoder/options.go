package decoder

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// Options is the configuration of an [Engine]. The zero value is valid.
type Options struct {
	// Context is the most tokens of a text, prompt and continuation. 0: as many as the network takes, but at most 4096.
	Context int

	// Tokens is the capacity of the cache: tokens of all texts together, at least Context. 0: Context. Texts that
	// begin alike share tokens. When the cache is full, the youngest of the least urgent texts waits. Its tokens are computed again later,
	// unless Swap keeps them.
	//
	// If every layer has a window, the cache keeps the tokens in the largest window, and some more. Then Tokens may be less than
	// Context: a text takes at most the window, Chunk, Draft and 320 tokens. Later texts share the beginning of a text only while
	// the cache keeps the tokens at the end of that beginning.
	Tokens int

	Batch int // most texts of a step; 0: 16
	// Chunk is the most rows of a step. Longer prompts take several steps. 0 is 2048 on a GPU. On a CPU 0 is 64 rows for each
	// processor, but at least 384 and at most 1024.
	Chunk int

	Draft int // most guesses of a step: see [Request].Draft; 0: none

	// Gap bounds how long texts wait for their next tokens while other texts read their prompts: a step with rows of prompts takes about
	// Gap times as long as a step without, at least 1. Then the number of these rows depends on measured times. 0: Chunk alone bounds
	// the rows. Not with Ranks.
	Gap float64

	// Swap is a folder for the keys and values of texts that wait since the cache is full. "": the tokens of these texts are computed again,
	// as are those that SwapBytes has no room for, and those of files that cannot be written or read. Files are removed when their texts go
	// on or end, and after a crash by the next engine that uses the folder. Not with Ranks.
	Swap string
	// SwapBytes is the most bytes of these files; 0: 4 GiB.
	SwapBytes int64

	// Weights is the element type of matrices: float32, leanattention.Float16, leanattention.BFloat16, tensor.Int8, leanattention.E4M3 or
	// nn.Int4 (see nn.Rounded). The zero value is the type of the files:
	//
	//   - On the CPU, matrices of a GGUF file in fewer than 16 bits stay as they are, in the mapped file (see nn.Quantised). The file must
	//     not be cut while an engine is open.
	//   - On the CPU, matrices of a folder by GPTQ, by AWQ or in FP8 keep their numbers, scales and zeros.
	//   - On GPUs, matrices of all formats keep their numbers, too. On compute capability 9.0, a step of one or two texts is one
	//     launch. Matrices of Q4_K, Q5_K and Q6_K, matrices with an order of columns (desc_act), and matrices with groups of more than
	//     128 columns have launches of their own. As leanattention.Float16, such matrices take more memory, and are a part of the one
	//     launch.
	//   - Matrices with an adapter, those that latent attention splits, and columns that several GPUs or ranks cannot divide into whole
	//     blocks become float16.
	//
	// Matrices that latent attention splits are never of 8 or 4 bits: with these types they have the type of the files.
	Weights tensor.Dtype
	Cache   tensor.Dtype // element type of keys and values, as leanattention.CacheConfig has it; zero value: float32

	EdgeLayers int // with a Cache of 8 or 4 bits: first layers, and last layers, of 16 bits, as leanattention.CacheConfig has them

	// Exact computes products of float32 with weights of 16 bits and fewer in float32. Otherwise linear layers may round their
	// inputs to the weights' type, or to 8 bits for weights of fewer than 16, and attention its queries to the cache's, where that is
	// faster: see nn.WithMixedPrecision.
	Exact bool

	// QuantisedRows makes linear layers with weights of tensor.Int8 or leanattention.E4M3 quantise their inputs by row, in steps of 65 rows
	// and more, such as those of prompts: see nn.WithQuantisedRows. Layers of latent attention keep their inputs. ErrUnsupported: no layer has
	// such weights; a GPU of another compute capability than 9.0; Exact or BatchInvariant.
	QuantisedRows bool

	// BatchInvariant gives a token the same bits whatever else a step computes, so that a text depends on its [Request] alone to the last
	// bit. Prompts take longer. On GPUs, that holds for attention alone: linear layers depend on the number of rows.
	BatchInvariant bool

	Schedule la.Schedule // of attention
	Workers  int         // of attention; 0: GOMAXPROCS

	// Device is the GPU that computes, and that has the weights and the cache; nil: the CPU. Several GPUs (device.Open) share the
	// weights and the cache. Device must stay open until the engine is closed. Engines of one GPU take turns.
	Device *device.GPU

	// Shard says how several GPUs share the cache. With latent attention leanattention.ShardAuto is ShardHeads: each GPU, and each of
	// the Ranks, has all latent vectors, and attends with some of the heads.
	Shard la.Shard

	// Ranks are the processes that compute together, each with a part of the weights and of the cache, on Device; nil: this
	// process alone. Ranks must stay open until the engine is closed. Then:
	//
	//   - All ranks make the same engine: the same network, weights and options, except for Device and Progress.
	//   - All ranks call the methods of the engine, and of its texts, in the same order, from one goroutine.
	//   - Steps are computed while the goroutine waits for a text. Start takes no context that may be cancelled.
	Ranks *ranks.Comm

	// TPLA, if not nil, splits the latent vectors of each layer of a network with latent attention, an approximation: see nn.TPLA. The
	// differences of [Engine.LogProbs] are its error. Prompts of 64 rows and more, of texts without cached tokens, are exact; LogProbs
	// has no such prompts.
	//
	//   - One process, on the CPU or one GPU: it has the weights of both forms beside the network's.
	//   - Ranks, as many as shards, with one GPU each: a rank has one shard, and all heads.
	//   - On GPUs all prompts are approximate.
	//   - Save and Load are ErrUnsupported.
	TPLA func(layer int) *nn.TPLA

	// Progress, if not nil, is called with the number of weights that have been loaded, and the number of all.
	Progress func(done, all int)
}

const (
	defaultContext = 4096
	defaultBatch   = 16
	defaultChunk   = 384  // enough rows for products with the weights to be bound by arithmetic on a few cores
	coreChunk      = 64   // rows for each core
	coresChunk     = 1024 // most rows for many cores
	gpuChunk       = 2048
	pageSize       = 64
	mostRows       = 1 << 20
	mostChosen     = 1 << 19              // largest vocabulary from which a GPU chooses: see nn.ArgMax
	mostAhead      = 4                    // steps that the host queues together, while it waits for as many: joins and ends wait for both
	aheadTime      = 2 * time.Millisecond // the most that steps that are queued together take; a longer step is queued alone
)

// fill checks the options, and fills their defaults in.
func (o *Options) fill(s *Sizes) error {
	most := s.Context
	if most == 0 {
		most = mostRows
	}
	if o.Context == 0 {
		o.Context = min(most, defaultContext)
	}
	if o.Batch == 0 {
		o.Batch = defaultBatch
	}
	if o.Chunk == 0 {
		if o.Chunk = max(defaultChunk, min(coreChunk*runtime.GOMAXPROCS(0), coresChunk)); o.Device != nil {
			o.Chunk = gpuChunk
		}
		o.Chunk = max(min(o.Chunk, max(o.Tokens, o.Context)), o.Batch)
	}
	if o.Tokens == 0 {
		o.Tokens = o.Context
	}
	if s.Latent > 0 && o.Shard == la.ShardAuto {
		o.Shard = la.ShardHeads
	}
	for _, x := range []struct {
		name          string
		n, least, top int
	}{
		{"Context", o.Context, 1, most}, {"Tokens", o.Tokens, o.textTokens(s), 1 << 30}, {"Batch", o.Batch, 1, mostRows},
		{"Chunk", o.Chunk, o.Batch, mostRows}, {"Draft", o.Draft, 0, 1 << 10}, {"Workers", o.Workers, 0, 1 << 20},
	} {
		if x.n < x.least || x.n > x.top {
			return fmt.Errorf("decoder: Options.%s is %d, not in [%d, %d]: %w", x.name, x.n, x.least, x.top, ErrConfig)
		}
	}
	if g := o.Gap; g != 0 && !(g >= 1 && g <= 1e6) {
		return fmt.Errorf("decoder: Options.Gap is %v, neither 0 nor in [1, 1e6]: %w", g, ErrConfig)
	} else if g != 0 && o.Ranks != nil {
		return fmt.Errorf("decoder: Options.Gap is %v with Ranks, each of which measures other times: %w", g, ErrConfig)
	}
	switch {
	case o.SwapBytes < 0:
		return fmt.Errorf("decoder: Options.SwapBytes is %d, less than 0: %w", o.SwapBytes, ErrConfig)
	case o.SwapBytes > 0 && o.Swap == "":
		return fmt.Errorf("decoder: Options.SwapBytes is %d, and Options.Swap names no folder: %w", o.SwapBytes, ErrConfig)
	case o.Swap != "" && o.Ranks != nil:
		return fmt.Errorf("decoder: Options.Swap is %q, and Options.Ranks are %d processes, which would have to read and write alike: the cache of one process alone can go to files: %w", o.Swap, o.world().Size, ErrUnsupported)
	case o.Swap != "" && o.SwapBytes == 0:
		o.SwapBytes = 4 << 30
	}
	types := []tensor.Dtype{{}, tensor.Float32, la.Float16, la.BFloat16}
	switch t := o.Weights; {
	case slices.Contains(types, t):
	case !roundedTo(t):
		return fmt.Errorf("decoder: Options.Weights is %v; known are float32, int8, nn.Int4, and leanattention.Float16, BFloat16 and E4M3: %w", t, ErrConfig)
	}
	switch t := o.Cache; {
	case slices.Contains(types, t):
	case !fewBits(t):
		return fmt.Errorf("decoder: Options.Cache is %v; known are float32, int8, and leanattention.Float16, BFloat16, E4M3 and Q4: %w", t, ErrConfig)
	}
	if o.QuantisedRows {
		for _, x := range []struct {
			name string
			on   bool
		}{{"Exact", o.Exact}, {"BatchInvariant", o.BatchInvariant}} {
			if x.on {
				return fmt.Errorf("decoder: Options.QuantisedRows and Options.%s: leave one of them out: %w", x.name, ErrUnsupported)
			}
		}
		if o.Device != nil {
			for _, m := range o.Device.Members() {
				if m.Capability != 90 {
					return fmt.Errorf("decoder: Options.QuantisedRows on a GPU of compute capability %d.%d, want 9.0, or leave it out: %w", m.Capability/10, m.Capability%10, ErrUnsupported)
				}
			}
		}
	}
	if o.several() && o.Device == nil {
		return fmt.Errorf("decoder: Options.Ranks are %d processes, and Options.Device is nil: ranks compute on GPUs: %w", o.Ranks.World().Size, ErrUnsupported)
	}
	return nil
}

// fewBits reports whether a cache of a type has fewer than 16 bits for a number.
func fewBits(t tensor.Dtype) bool { return t == la.E4M3 || t == tensor.Int8 || t == la.Q4 }

// rewind returns how many of the last tokens of a text can be dropped, if the cache keeps the tokens in a window.
func (o *Options) rewind() int { return pageSize + o.Draft }

// textTokens returns the most tokens of a text that the cache has.
func (o *Options) textTokens(s *Sizes) int {
	if w := s.window(); w > 0 && w < o.Context {
		// Between two steps a text has two partly filled pages. In a step it has the pages of its new tokens, too.
		return min(o.Context, w+o.rewind()+2*pageSize+o.Chunk+2*pageSize)
	}
	return o.Context
}

// byContext reports whether several GPUs share the pages of a cache with a number of KV heads.
func (o *Options) byContext(heads int) bool {
	return o.Device != nil && len(o.Device.Members()) > 1 && (o.Shard == la.ShardContext || o.Shard == la.ShardAuto && heads%len(o.Device.Members()) != 0)
}

// world returns which of the processes this process is.
func (o *Options) world() ranks.World {
	if o.Ranks == nil {
		return ranks.World{Size: 1}
	}
	return o.Ranks.World()
}

// several reports whether several processes compute.
func (o *Options) several() bool { return o.world().Size > 1 }

// graphs returns the graphs, those of fewer rows first: for steps of one token of each text, and for steps with prompts. In host
// memory a graph computes the rows of a step alone. On a GPU a recording computes all its rows.
func (o *Options) graphs() (all []graphConfig) {
	add := func(rows int) {
		all = append(all, graphConfig{rows: rows, appends: rows, all: true, recorded: o.Device != nil})
	}
	if o.Device != nil {
		for n := 1; n < o.Batch; n *= 2 {
			add(n)
		}
	}
	add(o.Batch)
	if o.Chunk > 1 {
		all = append(all, graphConfig{rows: o.Chunk, appends: o.Batch})
	}
	return all
}
