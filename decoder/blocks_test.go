package decoder

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/gguf"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// ggufTensor is a tensor to write.
type ggufTensor struct {
	name  string
	shape []int
	typ   gguf.Type
	data  []byte
}

// writeGGUF writes a file.
func writeGGUF(t testing.TB, keys map[string]any, tensors []ggufTensor) string {
	t.Helper()
	b := append([]byte("GGUF"), 3, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(tensors)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(keys)))
	b = append(b, metadata(keys)...)
	var data []byte
	for _, x := range tensors {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(x.name)))
		b = append(b, x.name...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(x.shape)))
		for _, n := range slices.Backward(x.shape) {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(x.typ))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(data)))
		data = append(data, x.data...)
		data = append(data, make([]byte, (32-len(data)%32)%32)...)
	}
	b = append(b, make([]byte, (32-len(b)%32)%32)...)
	path := filepath.Join(t.TempDir(), "model.gguf")
	if err := os.WriteFile(path, append(b, data...), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// blockSizes are the elements and the bytes of a block, and the offsets of its 16-bit numbers.
var blockSizes = map[gguf.Type]struct {
	elements, bytes int
	factors         []int
}{
	gguf.Q8_0: {32, 34, []int{0}}, gguf.Q4_0: {32, 18, []int{0}}, gguf.Q4_1: {32, 20, []int{0, 2}},
	gguf.Q5_0: {32, 22, []int{0}}, gguf.Q5_1: {32, 24, []int{0, 2}},
	gguf.Q4_K: {256, 144, []int{0, 2}}, gguf.Q5_K: {256, 176, []int{0, 2}}, gguf.Q6_K: {256, 210, []int{208}},
}

// writeBlocks writes a Llama model with matrices of random blocks, of one type after the other.
func writeBlocks(t testing.TB, rng *rand.Rand, tied bool) string {
	return writeBlocksOf(t, rng, tied, 8, 4, 2)
}

func writeBlocksOf(t testing.TB, rng *rand.Rand, tied bool, heads, kv, layers int) string {
	const width, inner, vocab = 256, 512, 96
	keys := map[string]any{
		"general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": width, "llama.feed_forward_length": inner,
		"llama.attention.head_count": heads, "llama.attention.head_count_kv": kv, "llama.attention.layer_norm_rms_epsilon": 1e-5,
		"llama.context_length": 256, "llama.rope.dimension_count": width / heads, "llama.vocab_size": vocab,
	}
	var all []ggufTensor
	matrix := func(name string, rows, columns int) {
		of := inBlocks[len(all)%len(inBlocks)]
		size := blockSizes[of]
		data := make([]byte, rows*columns/size.elements*size.bytes)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		for at := 0; at < len(data); at += size.bytes {
			for i, k := range size.factors {
				x := la.F16(0x1400 + rng.IntN(0x400)) // 2^-10 to 2^-9
				switch {
				case size.elements == 256: // about 2^-15, and minima are subtracted
					x = 0x100 + la.F16(rng.IntN(0x100))
				case i == 1:
					x = 0x9c00 + la.F16(rng.IntN(0x400)) // a minimum of about -2^-8
				}
				binary.LittleEndian.PutUint16(data[at+k:], uint16(x))
			}
		}
		all = append(all, ggufTensor{name, []int{rows, columns}, of, data})
	}
	vector := func(name string, n int) {
		data := make([]byte, 4*n)
		for i := range n {
			binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(1+rng.Float32()))
		}
		all = append(all, ggufTensor{name, []int{n}, gguf.F32, data})
	}
	matrix("token_embd.weight", vocab, width)
	for i := range layers {
		prefix := "blk." + string('0'+rune(i)) + "."
		vector(prefix+"attn_norm.weight", width)
		matrix(prefix+"attn_q.weight", width, width)
		matrix(prefix+"attn_k.weight", width/heads*kv, width)
		matrix(prefix+"attn_v.weight", width/heads*kv, width)
		matrix(prefix+"attn_output.weight", width, width)
		vector(prefix+"ffn_norm.weight", width)
		matrix(prefix+"ffn_gate.weight", inner, width)
		matrix(prefix+"ffn_up.weight", inner, width)
		matrix(prefix+"ffn_down.weight", width, inner)
	}
	vector("output_norm.weight", width)
	if !tied {
		matrix("output.weight", vocab, width)
	}
	return writeGGUF(t, keys, all)
}

// continued returns the log-probabilities of tokens, and the tokens that follow.
func continued(t testing.TB, m *Model, o Options, tokens []int) (p []float64, next []int) {
	t.Helper()
	e, err := m.Engine(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	return continuedBy(t, e, tokens)
}

func continuedBy(t testing.TB, e *Engine, tokens []int) (p []float64, next []int) {
	t.Helper()
	p, err := e.LogProbs(context.Background(), tokens)
	if err != nil {
		t.Fatal(err)
	}
	text, err := e.Start(context.Background(), Request{Prompt: tokens, Tokens: 8, Ends: []int{}})
	if err != nil {
		t.Fatal(err)
	}
	for token, err := range text.Tokens() {
		if err != nil {
			t.Fatal(err)
		}
		next = append(next, token.ID)
	}
	return p, next
}

// TestBlocksOfFile: matrices of a GGUF file stay as they are. Exact products have the bits of the decoded matrices, also if the model is
// closed first, and products with activations of 8 bits are near.
func TestBlocksOfFile(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	tokens := make([]int, 200)
	for i := range tokens {
		tokens[i] = rng.IntN(96)
	}
	for _, tied := range []bool{false, true} {
		m := withoutTokenizer(t, writeBlocks(t, rng, tied))
		want, text := continued(t, m, Options{Exact: true, Weights: tensor.Float32}, tokens)
		e, err := m.Engine(Options{Exact: true})
		if err != nil {
			t.Fatal(err)
		}
		kept := 0
		for w := range m.network.Weights() {
			if of := e.weights[w.Name].(interface{ Dtype() tensor.Dtype }).Dtype(); strings.HasPrefix(of.Name(), "Q") {
				kept++
			} else if len(w.Shape) == 2 {
				t.Errorf("%s is of %v", w.Name, of)
			}
		}
		if tied && e.weights["lm_head.weight"] != e.weights["embed_tokens.weight"] || kept != 16 {
			t.Errorf("tied %v: %d matrices are in blocks", tied, kept)
		}
		mixed, _ := continued(t, m, Options{}, tokens)
		eight, _ := continued(t, m, Options{Exact: true, Weights: tensor.Int8}, tokens)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if _, err := m.Engine(Options{}); !errors.Is(err, ErrClosed) {
			t.Errorf("an engine of a closed model: %v", err)
		}
		if p, next := continuedBy(t, e, tokens); !slices.Equal(p, want) || !slices.Equal(next, text) {
			t.Errorf("tied %v: %v and %v of blocks, %v and %v of float32", tied, p[:4], next, want[:4], text)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		for name, p := range map[string][]float64{"mixed precision": mixed, "int8": eight} {
			off := 0.0
			for i := range p {
				off += math.Abs(p[i]-want[i]) / float64(len(p))
			}
			if off == 0 || off > 0.2 {
				t.Errorf("tied %v, %s: log-probabilities are off by %v", tied, name, off)
			}
		}
	}
}

// TestBlocksMemory: what stays in blocks counts as its bytes, INT8 as a byte an element, and an adapted matrix as 16 bits.
func TestBlocksMemory(t *testing.T) {
	m := withoutTokenizer(t, writeBlocks(t, rand.New(rand.NewPCG(3, 4)), true))
	defer m.Close()
	var file, eight, vectors int64
	for w := range m.network.Weights() {
		n := int64(tensor.Shape(w.Shape).TotalSize())
		if len(w.Shape) == 1 {
			vectors += 4 * n
		} else if w.Name != "lm_head.weight" { // which is the embedding
			eight += n
			file += int64(w.Shape[0] * m.files.blockRow(w.Name))
		}
	}
	if all, _, err := weightBytes(m.network, tensor.Dtype{}, m.files.blockRow); all != file+vectors || err != nil {
		t.Errorf("%d bytes of blocks, want %d", all, file+vectors)
	}
	if all, _, err := weightBytes(m.network, tensor.Int8, nil); all != eight+vectors || err != nil {
		t.Errorf("%d bytes of int8, want %d", all, eight+vectors)
	}
	if all, _, err := weightBytes(m.network, nn.Int4, nil); all != eight/32*19+vectors || err != nil {
		t.Errorf("%d bytes of int4, want %d", all, eight/32*19+vectors)
	}
	const adapted = "layers.0.mlp.up_proj.weight"
	ones := func(n int) func(int, int) ([]float32, error) {
		return func(from, to int) ([]float32, error) { return slices.Repeat([]float32{1}, (to-from)*n), nil }
	}
	m.addDeltas(map[string]delta{adapted: {scale: 0.5, rank: 1, a: ones(256), b: ones(1)}}, func() error { return nil })
	if w := m.weights(); w.blockRow(adapted) != 0 || w.blockRow("layers.1.mlp.up_proj.weight") == 0 {
		t.Errorf("rows of %d bytes of an adapted matrix", w.blockRow(adapted))
	}
	e, err := m.Engine(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if of := e.weights[adapted].(interface{ Dtype() tensor.Dtype }).Dtype(); of != la.Float16 {
		t.Errorf("an adapted matrix is of %v", of)
	}
	got := e.weights[adapted].(*tensor.Dense).Data().([]la.F16)
	plain := make([]float32, len(got))
	if err := m.files.float32s(plain, adapted, []int{512, 256}, 0, 512); err != nil {
		t.Fatal(err)
	}
	merged := make([]float32, 2*256)
	if err := m.weights().float32s(merged, adapted, []int{512, 256}, 3, 5); err != nil {
		t.Fatal(err)
	}
	for i, x := range got {
		if math.Abs(float64(x.Float32()-plain[i]-0.5)) > 1e-3 {
			t.Fatalf("element %d is %v, and was %v", i, x.Float32(), plain[i])
		}
		if j := i - 3*256; j >= 0 && j < len(merged) && merged[j] != plain[i]+0.5 {
			t.Fatalf("element %d is %v as float32, and was %v", i, merged[j], plain[i])
		}
	}
}
