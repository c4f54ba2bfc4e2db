package leanattention_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// eightTypes are the types of caches of 8 and of 4 bits.
var eightTypes = []tensor.Dtype{la.E4M3, tensor.Int8, la.Q4}

// eightKinds is the number of kinds of caches of 8 and of 4 bits.
const eightKinds = 10

// eightCache returns the configuration of a small cache of a kind: with scales of tokens, of latents, of heads and of pages, of 4 bits,
// and two whose first and last layers have 16.
func eightCache(kind int) la.CacheConfig {
	if kind == 2 {
		return la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 272, ValueDim: 256, ValuesInKeys: true, DType: la.E4M3}
	}
	c := la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 24, ValueDim: 17, DType: eightTypes[kind%2]}
	switch kind {
	case 7, 8:
		c.HeadDim, c.ValueDim, c.DType = 64, 32, la.Q4
	}
	if kind >= 8 {
		c.Layers, c.EdgeLayers = 3, 1
	}
	switch kind {
	case 3, 4:
		c.Scales, c.KeyScales, c.ValueScales = la.ScalesByHead, []float32{0.05, 0.125, 0.03, 0.07}, []float32{0.02, 0.3, 0.1, 0.05}
		if kind == 4 {
			c.KeyScales = nil
		}
	case 5, 6:
		c.Scales = la.ScalesByPage
	}
	return c
}

// TestEightCachedAttention decodes on caches of 8 bits, with rotary embeddings, all masks, forks, shared prefixes and released pages.
// The reference attends to what the definition of the format says is stored.
func TestEightCachedAttention(t *testing.T) {
	test := func(t *testing.T) {
		rng := reftest.Rand(t)
		long, n := 70, reftest.Cases(t, 2*eightKinds, 8*eightKinds)
		if reftest.RaceEnabled {
			long, n = 20, eightKinds
		}
		for turn := range n {
			config := eightCache(turn % eightKinds)
			config.PageSize = []int{1, 3, 16, 64}[rng.IntN(4)]
			config.Pages = 8*long/config.PageSize + 24
			heads := config.KVHeads * (1 + rng.IntN(4))
			at := graphtest.Place{Used: turn%5 < 2}
			if turn%2 == 0 {
				at.Rotary = &rope.Config{HeadDim: config.HeadDim, Dim: 12, Last: config.ValuesInKeys}
			}
			switch rng.IntN(3) {
			case 0:
				at.ScoreMods = reftest.RandomScoreMods(rng, reftest.Shape{Heads: heads})
			case 1:
				config.Window, config.SinkTokens = 40, 3*(turn%2)
				at.ScoreMods.Window, at.ScoreMods.SinkTokens = 1+rng.IntN(40), config.SinkTokens
			}
			cache := graphtest.NewCache(t, config)
			la.PoisonFree(cache)
			query := []tensor.Dtype{tensor.Float32, tensor.Float64}[rng.IntN(2)]
			opts := []la.Option{la.WithSchedule(graphtest.Schedules[turn%3]), la.WithWorkers(turn % 5), la.WithTileTokens(32)}
			prefill := graphtest.NewDecoderAt(t, at, cache, long+50, heads, query, true, opts...)
			decode := graphtest.NewDecoderAt(t, at, cache, 4, heads, query, true, opts...)
			decodeMix(t, rng, cache, prefill, decode, long)
			closeCache(t, cache)
		}
	}
	test(t)
	t.Run("forks at once", func(t *testing.T) {
		la.SharePrefixes(t)
		test(t)
	})
}

// eightText is tokens of one text: rows of q, k and v of each layer.
type eightText [][3][]float32

const eightHeads = 4

// section is a part of a saved sequence: elements, or scales.
type section struct {
	plane, size, bytes int // size is that of an element
	scales             bool
}

// eightSections are the parts of a layer of tokens.
func eightSections(c la.CacheConfig, layer, tokens int) (all []section) {
	rows := tokens * c.KVHeads
	if c.ValuesInKeys {
		return []section{{0, 1, rows * c.ValueDim, false}, {0, 4, rows * c.ValueDim / 128 * 4, true}, {1, 2, rows * (c.HeadDim - c.ValueDim) * 2, false}}
	}
	for plane, dim := range []int{c.HeadDim, c.ValueDim} {
		if layer < c.EdgeLayers || layer >= c.Layers-c.EdgeLayers {
			all = append(all, section{plane, 2, rows * dim * 2, false})
			continue
		}
		if c.DType == la.Q4 {
			all = append(all, section{plane, 18, rows * dim / 32 * 18, false})
			continue
		}
		all = append(all, section{plane, 1, rows * dim, false})
		switch c.Scales {
		case la.ScalesByToken:
			all = append(all, section{plane, 4, rows * 4, true})
		case la.ScalesByPage:
			all = append(all, section{plane, 4, (tokens + c.PageSize - 1) / c.PageSize * c.KVHeads * 4, true})
		}
	}
	return all
}

// eightHeader is the size of what is before the first layer.
func eightHeader(c la.CacheConfig) int {
	return 44 + map[la.Scales]int{la.ScalesByHead: 2 * 4 * c.Layers * c.KVHeads, la.ScalesByPage: 4}[c.Scales]
}

// newEightText draws a text. Heads have outliers, zeros and infinities now and then.
func newEightText(rng *rand.Rand, c la.CacheConfig, tokens int) (x eightText) {
	for range c.Layers {
		var rows [3][]float32
		for i, width := range []int{eightHeads * c.HeadDim, c.KVHeads * c.HeadDim, c.KVHeads * c.ValueDim} {
			size := 1.0
			for j := range tokens * width {
				if j%c.HeadDim == 0 {
					size = math.Exp2(float64(rng.IntN(6) - 3))
				}
				f := rng.NormFloat64() * size
				switch rng.IntN(200) {
				case 0:
					f *= 100
				case 1:
					f = 0
				}
				rows[i] = append(rows[i], float32(f))
			}
		}
		x = append(x, rows)
	}
	return x
}

// appendText appends tokens [from, to) of a text, beside one token for each other sequence. A tree's tokens are those of rows.
func appendText(t *testing.T, rng *rand.Rand, d *graphtest.Decoder, seq *la.Sequence, x eightText, rows []int, parents []int, others ...*la.Sequence) {
	t.Helper()
	c := d.Cache.Config()
	var appends []la.Append
	for _, o := range others {
		appends = append(appends, la.Append{Seq: o, Tokens: 1})
	}
	appends = append(appends, la.Append{Seq: seq, Tokens: len(rows), Parents: parents})
	err := d.Step.Run(appends, func() error {
		for l := range c.Layers {
			for i, n := range [][]*G.Node{d.Q, d.K, d.V} {
				if n == nil {
					continue
				}
				width := n[l].Shape()[1]
				value := make([]float64, d.Step.Tokens()*width)
				for j := range value {
					value[j] = rng.NormFloat64()
				}
				for j, row := range rows {
					for e, f := range x[l][i][row*width:][:width] {
						value[(len(others)+j)*width+e] = float64(f)
					}
				}
				graphtest.Let(t, n[l], graphtest.TensorOf(tensor.Float32, value, d.Step.Tokens(), width))
			}
		}
		graphtest.Again(t, d.VM)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func rowsFrom(from, n int) (rows []int) {
	for i := range n {
		rows = append(rows, from+i)
	}
	return rows
}

func savedBytes(t *testing.T, s *la.Sequence) []byte {
	t.Helper()
	var b bytes.Buffer
	if _, err := s.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func newSequence(t *testing.T, c *la.Cache) *la.Sequence {
	t.Helper()
	s, err := c.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestEightBits: the stored bits of a text are the same in whatever way it comes: in chunks, beside others, from a fork, after a
// truncation, as a branch of a tree, from a file, in pages of any size (if these have no scales).
func TestEightBits(t *testing.T) {
	rng := reftest.Rand(t)
	const tokens = 40
	for kind := range eightKinds {
		config := eightCache(kind)
		x := newEightText(rng, config, tokens)
		at := graphtest.Place{Rotary: &rope.Config{HeadDim: config.HeadDim, Dim: 8, Last: config.ValuesInKeys}}
		var want []byte
		for way := range 6 {
			if config.PageSize = []int{16, 1, 5, 64, 3, 7}[way]; config.Scales == la.ScalesByPage {
				config.PageSize = 5
				if way == 4 {
					continue // no trees
				}
			}
			config.Pages = 4*tokens/config.PageSize + 30
			cache := graphtest.NewCache(t, config)
			la.PoisonFree(cache)
			d := graphtest.NewDecoderAt(t, at, cache, tokens+2, eightHeads, tensor.Float32, true)
			s, other := newSequence(t, cache), newSequence(t, cache)
			chunks := func(from, to, n int) {
				for ; from < to; from += n {
					n = min(n, to-from)
					appendText(t, rng, d, s, x, rowsFrom(from, n), nil, other)
				}
			}
			switch way {
			case 0:
				chunks(0, tokens, tokens)
			case 1:
				chunks(0, tokens, 1)
			case 2: // forks that go on with other tokens
				chunks(0, 17, 6)
				fork, err := s.Fork()
				if err != nil {
					t.Fatal(err)
				}
				appendText(t, rng, d, fork, x, rowsFrom(3, 9), nil)
				chunks(17, tokens, 4)
			case 3: // tokens that are truncated
				chunks(0, 20, 20)
				appendText(t, rng, d, s, x, rowsFrom(5, 11), nil)
				if err := s.Truncate(20); err != nil {
					t.Fatal(err)
				}
				chunks(20, tokens, 7)
			case 4: // a branch of a tree
				chunks(0, 30, 11)
				appendText(t, rng, d, s, x, []int{2, 30, 3, 31, 32, 4}, []int{-1, -1, 0, 1, 3, 4})
				if err := s.Keep(30, []int{1, 3, 4}); err != nil {
					t.Fatal(err)
				}
				chunks(33, tokens, 3)
			case 5: // a file
				chunks(0, 25, 25)
				read, err := cache.ReadSequence(bytes.NewReader(savedBytes(t, s)))
				if err != nil {
					t.Fatal(err)
				}
				s = read
				chunks(25, tokens, 2)
			}
			got := savedBytes(t, s)
			if way == 0 {
				want = got
			} else if !bytes.Equal(got, want) {
				t.Errorf("%v, way %d: other bits", config.DType, way)
			}
			closeCache(t, cache)
		}
	}
}

// TestEightBatchInvariance is TestBatchInvariance on caches of 8 bits.
func TestEightBatchInvariance(t *testing.T) {
	for _, storage := range eightTypes {
		n := 100
		testTexts(t, nil, n, []textRun{
			{storage: storage, pages: 16, chunks: []int{n}},
			{storage: storage, pages: 5, chunks: []int{7}, others: 3},
			{storage: storage, pages: 64, chunks: []int{64, 1, 2, 3, 4}, others: 20},
			{storage: storage, pages: 1, chunks: []int{n/2 + 1}, fork: n / 2},
		})
	}
}

// TestEightBytes: caches and saved sequences have a byte for an element of 8 bits, 4 for its scale, and 18 for 32 numbers of 4 bits.
func TestEightBytes(t *testing.T) {
	rng := reftest.Rand(t)
	for kind := range eightKinds {
		config := eightCache(kind)
		config.Pages, config.PageSize = 10, 4
		bytesOf := func(tokens int) (n int) {
			for layer := range config.Layers {
				for _, s := range eightSections(config, layer, tokens) {
					n += s.bytes
				}
			}
			return n
		}
		if n, err := config.Bytes(); err != nil || n != int64(bytesOf(40)) {
			t.Errorf("kind %d: %d bytes, want %d: %v", kind, n, bytesOf(40), err)
		}
		cache := graphtest.NewCache(t, config)
		d := graphtest.NewDecoder(t, cache, 9, eightHeads, tensor.Float32, true)
		s := newSequence(t, cache)
		appendText(t, rng, d, s, newEightText(rng, config, 9), rowsFrom(0, 9), nil)
		if n, want := len(savedBytes(t, s)), eightHeader(config)+bytesOf(9)+4; n != want {
			t.Errorf("kind %d: %d bytes are saved, want %d", kind, n, want)
		}
		closeCache(t, cache)
	}
	deepSeek := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 576, ValueDim: 512, ValuesInKeys: true, DType: la.E4M3, PageSize: 1, Pages: 1}
	if n, err := deepSeek.Bytes(); err != nil || n != 656 {
		t.Errorf("a latent vector of 512 + 64 has %d bytes: %v", n, err)
	}
}

// TestEightNaN: NaN reaches the output of each query that sees its token, and no other output. A sequence with NaN is not saved, and a file
// with NaN or with a bad scale is not read.
func TestEightNaN(t *testing.T) {
	rng := reftest.Rand(t)
	for kind := range eightKinds {
		config := eightCache(kind)
		config.PageSize, config.Pages = 4, 20
		cache := graphtest.NewCache(t, config)
		d := graphtest.NewDecoder(t, cache, 9, eightHeads, tensor.Float32, true)
		clean, bad := newSequence(t, cache), newSequence(t, cache)
		x := newEightText(rng, config, 9)
		appendText(t, rng, d, clean, x, rowsFrom(0, 9), nil)
		file := savedBytes(t, clean)
		at := eightHeader(config) // of the first element
		nan := map[tensor.Dtype]byte{la.E4M3: 0x7f, tensor.Int8: 0x80}[config.DType]
		type damage struct {
			at   int
			to   []byte
			text string
		}
		for layer := range config.Layers {
			for _, s := range eightSections(config, layer, 9) {
				var all []damage
				switch {
				case s.scales:
					all = []damage{
						{4, []byte{0, 0, 0xc0, 0x7f}, "scale 1 is NaN"}, {0, []byte{0, 0, 0x80, 0x7f}, "scale 0 is +Inf"},
						{0, []byte{0, 0, 0, 0}, "scale 0 is 0"}, {0, []byte{0, 0, 0x80, 0xbf}, "scale 0 is -1"},
					}
				case s.size == 18:
					all = []damage{{18 + 16, []byte{0xc0, 0x7f}, "the scale of element 1 is NaN"}, {16, []byte{0x80, 0xff}, "the scale of element 0 is -Inf"}}
				case s.size == 1:
					all = []damage{{5, []byte{nan}, "element 5 is NaN"}}
				}
				for _, x := range all {
					b := slices.Clone(file[:len(file)-4])
					copy(b[at+x.at:], x.to)
					b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
					_, err := cache.ReadSequence(bytes.NewReader(b))
					wantError(t, err, la.ErrFormat, "ReadSequence", fmt.Sprintf("layer %d, plane %d: %s", layer, s.plane, x.text))
				}
				at += s.bytes
			}
		}
		if at != len(file)-4 {
			t.Fatalf("kind %d: the file has %d bytes, not %d", kind, len(file), at+4)
		}
		x[1][1][6*config.KVHeads*config.HeadDim] = float32(math.NaN()) // of layer 1's key 6, head 0
		appendText(t, rng, d, bad, x, rowsFrom(0, 9), nil)
		out := graphtest.Floats(t, d.OutValues[1])
		width := eightHeads * config.ValueDim
		for i, f := range out {
			token, head := i/width, i%width/config.ValueDim
			if want := token >= 6 && head/(eightHeads/config.KVHeads) == 0; math.IsNaN(f) != want {
				t.Fatalf("%v: output of token %d, head %d is %v", config.DType, token, head, f)
			}
		}
		_, err := bad.WriteTo(new(bytes.Buffer))
		wantError(t, err, la.ErrFormat, "WriteTo", "layer 1, plane 0", "NaN")
		closeCache(t, cache)
	}
}

// TestEightRefused: what 8 bits cannot do is refused by name.
func TestEightRefused(t *testing.T) {
	refuse := func(kind error, text string, config la.CacheConfig) {
		t.Helper()
		config.Layers, config.KVHeads, config.Pages = 1, 1, 4
		cache, err := la.NewCache(config)
		if err == nil {
			closeCache(t, cache)
		}
		wantError(t, err, kind, "NewCache", text)
	}
	refuse(la.ErrUnsupported, "DType is int8 with ValuesInKeys", la.CacheConfig{HeadDim: 192, ValueDim: 128, ValuesInKeys: true, DType: tensor.Int8})
	refuse(la.ErrUnsupported, "ValueDim is 129 with ValuesInKeys and E4M3; it must be a multiple of 128", la.CacheConfig{HeadDim: 200, ValueDim: 129, ValuesInKeys: true, DType: la.E4M3})
	refuse(la.ErrUnsupported, "HeadDim is 48 and ValueDim 64; with Q4 both must be multiples of 32", la.CacheConfig{HeadDim: 48, ValueDim: 64, DType: la.Q4})
	refuse(la.ErrUnsupported, "HeadDim is 64 and ValueDim 80; with Q4", la.CacheConfig{HeadDim: 64, ValueDim: 80, DType: la.Q4})
	refuse(la.ErrUnsupported, "DType is Q4 with ValuesInKeys", la.CacheConfig{HeadDim: 576, ValueDim: 512, ValuesInKeys: true, DType: la.Q4})
	refuse(la.ErrOption, "a cache of Q4 has no Scales", la.CacheConfig{HeadDim: 64, DType: la.Q4, Scales: la.ScalesByHead})
	refuse(la.ErrShape, "EdgeLayers is 1, and Layers 1: at least one layer", la.CacheConfig{HeadDim: 64, DType: la.Q4, EdgeLayers: 1})
	refuse(la.ErrShape, "EdgeLayers is -1", la.CacheConfig{HeadDim: 64, DType: la.Q4, EdgeLayers: -1})
	refuse(la.ErrDType, "DType is uint8", la.CacheConfig{HeadDim: 64, DType: tensor.Uint8})
	gpu, _ := la.FakeGPU(t)
	refuse(la.ErrUnsupported, "head dim 80 is not supported: kernels have head dims [64 128 256]", la.CacheConfig{HeadDim: 80, DType: tensor.Int8, Device: gpu})
	refuse(la.ErrUnsupported, "pages of 3 tokens with head dim 64 and e4m3", la.CacheConfig{HeadDim: 64, DType: la.E4M3, PageSize: 3, Device: gpu})
	refuse(la.ErrUnsupported, "head dim 96 is not supported: kernels have head dims [64 128 256]", la.CacheConfig{HeadDim: 96, DType: la.Q4, Device: gpu})
	refuse(la.ErrUnsupported, "pages of 6 tokens with head dim 64 and q4", la.CacheConfig{HeadDim: 64, DType: la.Q4, Device: gpu, PageSize: 6})
	refuse(la.ErrUnsupported, "keys of 700 elements with values of 512 in them", la.CacheConfig{HeadDim: 700, ValueDim: 512, ValuesInKeys: true, DType: la.E4M3, Device: gpu})

	plain := la.CacheConfig{HeadDim: 64, DType: la.E4M3}
	with := func(change func(*la.CacheConfig)) la.CacheConfig {
		c := plain
		change(&c)
		return c
	}
	refuse(la.ErrOption, "Scales is Scales(3), none of ScalesByToken", with(func(c *la.CacheConfig) { c.Scales = 3 }))
	refuse(la.ErrOption, "a cache of Float16 has no Scales", with(func(c *la.CacheConfig) { c.DType, c.Scales = la.Float16, la.ScalesByPage }))
	refuse(la.ErrUnsupported, "Scales is ScalesByHead with ValuesInKeys", la.CacheConfig{HeadDim: 192, ValueDim: 128, ValuesInKeys: true, DType: la.E4M3, Scales: la.ScalesByHead})
	refuse(la.ErrOption, "KeyScales is set, and Scales is ScalesByToken", with(func(c *la.CacheConfig) { c.KeyScales = []float32{1} }))
	refuse(la.ErrOption, "ValueScales is set, and Scales is ScalesByPage", with(func(c *la.CacheConfig) { c.Scales, c.ValueScales = la.ScalesByPage, []float32{1} }))
	refuse(la.ErrShape, "ValueScales has 2 scales; one for each of 1 layer", with(func(c *la.CacheConfig) { c.Scales, c.ValueScales = la.ScalesByHead, []float32{1, 1} }))
	for _, bad := range []float32{0, -1, float32(math.NaN()), float32(math.Inf(1))} {
		refuse(la.ErrOption, "KeyScales[0] is", with(func(c *la.CacheConfig) { c.Scales, c.KeyScales = la.ScalesByHead, []float32{bad} }))
	}

	latents := eightCache(2)
	latents.Pages = 3
	cache := graphtest.NewCache(t, latents)
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	node := func(name string, width int) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(2, width), G.WithName(name))
	}
	_, err = la.PromptAttention(node("q", 64), node("k", 64), node("v", 64), node("latents", 272), 2, step.Layer(0))
	wantError(t, err, la.ErrUnsupported, "PromptAttention", "the cache is of E4M3", "call CachedAttention")

	// A sequence is for caches of its type and its scales.
	for kind, others := range map[int]map[int]string{
		0: {1: "is of E4M3 and the cache of int8", 4: "has a scale for each token and head and the cache a scale for each head"},
		3: {5: "has a scale for each head and the cache a scale for each page and head"},
		6: {1: "has a scale for each page and head and the cache a scale for each token and head"},
	} {
		config := eightCache(kind)
		config.Pages = 3
		file := savedBytes(t, newSequence(t, graphtest.NewCache(t, config)))
		for other, text := range others {
			config := eightCache(other)
			config.Pages = 3
			if config.DType != eightCache(kind).DType && kind > 0 {
				config.DType = eightCache(kind).DType
			}
			_, err := graphtest.NewCache(t, config).ReadSequence(bytes.NewReader(file))
			wantError(t, err, la.ErrDType, "ReadSequence", text)
		}
		switch config.Scales {
		case la.ScalesByHead:
			config.ValueScales[2] = 5
			_, err := graphtest.NewCache(t, config).ReadSequence(bytes.NewReader(file))
			wantError(t, err, la.ErrShape, "ReadSequence", "ValueScales[2] is 0.1 in the saved sequence and 5 in the cache")
			config = eightCache(kind)
			config.Pages, config.KeyScales = 3, nil
			_, err = graphtest.NewCache(t, config).ReadSequence(bytes.NewReader(file))
			wantError(t, err, la.ErrShape, "ReadSequence", "KeyScales[0] is 0.05 in the saved sequence and 1 in the cache")
		case la.ScalesByPage:
			config.PageSize = 5
			_, err := graphtest.NewCache(t, config).ReadSequence(bytes.NewReader(file))
			wantError(t, err, la.ErrShape, "ReadSequence", "PageSize is 64 in the saved sequence and 5 in the cache")
		}
	}

	// Tokens stay in the pages whose scales they have.
	rng := reftest.Rand(t)
	paged := eightCache(5)
	paged.Pages, paged.PageSize = 8, 4
	cache = graphtest.NewCache(t, paged)
	d := graphtest.NewDecoder(t, cache, 9, eightHeads, tensor.Float32, true)
	s := newSequence(t, cache)
	err = d.Step.Set([]la.Append{{Seq: s, Tokens: 3, Parents: []int{-1, -1, 0}}})
	wantError(t, err, la.ErrUnsupported, "Set", "append 0 has Parents, on a cache with ScalesByPage")
	appendText(t, rng, d, s, newEightText(rng, paged, 9), rowsFrom(0, 9), nil)
	wantError(t, s.Keep(2, []int{0, 1, 4}), la.ErrUnsupported, "Keep", "path moves token 6, on a cache with ScalesByPage")
	if err := s.Keep(2, []int{0, 1}); err != nil || s.Len() != 4 {
		t.Errorf("%d tokens: %v", s.Len(), err)
	}
}

// TestEightEdges: EdgeLayers are for types of fewer than 16 bits, and a saved sequence is for caches with as many.
func TestEightEdges(t *testing.T) {
	config := eightCache(8)
	config.Pages = 3
	file := savedBytes(t, newSequence(t, graphtest.NewCache(t, config)))
	config.EdgeLayers = 0
	_, err := graphtest.NewCache(t, config).ReadSequence(bytes.NewReader(file))
	wantError(t, err, la.ErrShape, "ReadSequence", "EdgeLayers is 1 in the saved sequence and 0 in the cache")
	config.DType, config.EdgeLayers = la.Float16, 1
	_, err = la.NewCache(config)
	wantError(t, err, la.ErrOption, "NewCache", "EdgeLayers is 1, and a cache of Float16 has 16 bits and more in all layers")
	gpu, _ := la.FakeGPU(t)
	config.DType, config.Device, config.ValueDim = la.E4M3, gpu, 64
	_, err = la.NewCache(config)
	wantError(t, err, la.ErrUnsupported, "NewCache", "EdgeLayers is 1, and the cache is on")
}

// TestEightConfig: a cache has the scales that it was given, whatever becomes of the slices.
func TestEightConfig(t *testing.T) {
	config := eightCache(3)
	config.Pages = 1
	cache := graphtest.NewCache(t, config)
	config.KeyScales[0] = 7
	got := cache.Config()
	if got.KeyScales[0] != 0.05 {
		t.Error(got.KeyScales)
	}
	if got.ValueScales[1] = 8; cache.Config().ValueScales[1] != 0.3 {
		t.Error(cache.Config().ValueScales)
	}
}

// TestEightWindowSaved: sequences that gave pages back are saved with the scales of their pages, and go on in caches of other windows.
func TestEightWindowSaved(t *testing.T) {
	rng := reftest.Rand(t)
	for kind := range eightKinds {
		config := eightCache(kind)
		config.PageSize, config.Pages, config.Window, config.SinkTokens, config.Rewind = 4, 40, 9, 3, 2
		at := graphtest.Place{ScoreMods: reftest.Shape{Mask: attn.Mask{Window: 5, SinkTokens: 3}}}
		first := graphtest.NewCache(t, config)
		d := graphtest.NewDecoderAt(t, at, first, 20, eightHeads, tensor.Float32, true)
		s := graphtest.NewStored(t, first)
		for _, n := range []int{7, 20, 1, 3} {
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: n})
		}
		file := savedBytes(t, s.Seq)
		config.Window, config.Rewind = 5, 0
		second := graphtest.NewCache(t, config)
		la.PoisonFree(second)
		seq, err := second.ReadSequence(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		loaded := s.Fork(t)
		loaded.Seq = seq
		graphtest.NewDecoderAt(t, at, second, 9, eightHeads, tensor.Float32, true).Do(t, rng, reftest.Normal, graphtest.Appended{To: loaded, Tokens: 6})
	}
}
