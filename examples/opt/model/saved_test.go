package model

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/devicetest"

	"gorgonia.org/tensor"
)

// A saved sequence, or its beginning, goes on in another decoder as it would have in
// its own.
func TestSaved(t *testing.T) { testSaved(t, Options{Chunk: 8}, Options{Chunk: 8}) }

func TestGPUSaved(t *testing.T) {
	gpu := devicetest.Open(t)
	testSaved(t, Options{Chunk: 8, Device: gpu}, Options{Chunk: 8})
	testSaved(t, Options{Chunk: 8}, Options{Chunk: 8, Device: gpu})
}

func testSaved(t *testing.T, from, to Options) {
	rng := seeded(t)
	c := small()
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.MaxPositions, c.Layers = 128, 128, 2, 100, 1
	w := load(t, c, rng)
	from.Capacity, to.Capacity, to.ForkTokens = []int{20, 20}, []int{20, 20}, 20 // room beside what is there
	a, b := newDecoder(t, w, from), newDecoder(t, w, to)
	texts := prompts(rng, c.VocabSize, 11, 3)
	if err := errors.Join(a.Prefill(context.Background(), texts, nil), b.Prefill(context.Background(), texts, nil)); err != nil {
		t.Fatal(err)
	}
	var saved bytes.Buffer
	if err := a.WriteSequence(0, &saved); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{11, 6} {
		if err := errors.Join(b.ReadSequence(1, bytes.NewReader(saved.Bytes()), 11), b.Truncate(1, n)); err != nil {
			t.Fatal(err)
		}
		if b.Len(1) != n || b.Logits(1) != nil {
			t.Errorf("%d tokens, want %d", b.Len(1), n)
		}
		more := prompts(rng, c.VocabSize, 0, 4)
		if err := b.Prefill(context.Background(), more, nil); err != nil {
			t.Fatal(err)
		}
		text := append(texts[0][:n:n], more[1]...)
		closeTo(t, "behind what was saved", b.Logits(1), reference{w}.last(text), 2e-4)
	}

	before := b.Len(1)
	for _, err := range []error{
		b.ReadSequence(1, bytes.NewReader(saved.Bytes()), 12), b.ReadSequence(1, bytes.NewReader(saved.Bytes()), 10),
		b.ReadSequence(1, bytes.NewReader(saved.Bytes()), 21), b.ReadSequence(1, bytes.NewReader(saved.Bytes()), -1),
		b.ReadSequence(2, bytes.NewReader(saved.Bytes()), 11), a.WriteSequence(-1, &saved),
	} {
		if !errors.Is(err, ErrConfig) {
			t.Errorf("%v", err)
		}
	}
	if err := b.ReadSequence(1, bytes.NewReader(saved.Bytes()[:saved.Len()-9]), 11); !errors.Is(err, la.ErrFormat) {
		t.Errorf("cut: %v", err)
	}
	if b.Len(1) != before {
		t.Errorf("an error left %d tokens of %d", b.Len(1), before)
	}
	if s := b.cache.(*leanCache).Stats(); s.Sequences != 2 || s.Tokens != b.Len(0)+b.Len(1) {
		t.Errorf("something is kept: %+v", s)
	}
	// Whichever write or read fails, it is told, and both sequences are as before.
	logits := append([]float32(nil), b.Logits(1)...)
	for n, failed := 0, true; failed; n++ {
		f := &faulty{Buffer: bytes.NewBuffer(nil), after: n}
		err := a.WriteSequence(0, f)
		if failed = f.after < 0; failed != errors.Is(err, errFault) || a.Len(0) != 11 || !failed && !bytes.Equal(f.Bytes(), saved.Bytes()) {
			t.Errorf("write %d: %v", n, err)
		}
	}
	for n, failed := 0, true; failed; n++ {
		f := &faulty{Buffer: bytes.NewBuffer(saved.Bytes()), after: n}
		err := b.ReadSequence(1, f, 11)
		if failed = f.after < 0; failed != errors.Is(err, errFault) || !failed && b.Len(1) != 11 || failed && (b.Len(1) != before || !slices.Equal(b.Logits(1), logits)) {
			t.Errorf("read %d: %v, %d tokens", n, err, b.Len(1))
		}
		if s := b.cache.(*leanCache).Stats(); s.Sequences != 2 || s.Tokens != b.Len(0)+b.Len(1) {
			t.Errorf("read %d: something is kept: %+v", n, s)
		}
	}
	stock := newDecoder(t, w, Options{Capacity: []int{20}, Attention: Default})
	if err := stock.WriteSequence(0, &saved); !errors.Is(err, ErrConfig) {
		t.Errorf("no pages: %v", err)
	}
}

var errFault = errors.New("a fault")

// faulty is a file whose reads and writes fail once, after so many that did not; after is -1 then.
type faulty struct {
	*bytes.Buffer
	after int
}

func (f *faulty) Read(p []byte) (int, error) {
	if f.after--; f.after == -1 {
		return 0, errFault
	}
	return f.Buffer.Read(p)
}

func (f *faulty) Write(p []byte) (int, error) {
	if f.after--; f.after == -1 {
		n, _ := f.Buffer.Write(p[:len(p)/2])
		return n, errFault
	}
	return f.Buffer.Write(p)
}

// The fingerprint is another one with any other weight, config or type, and the same
// for the same.
func TestFingerprint(t *testing.T) {
	sums := map[[32]byte]string{}
	of := func(c hf.Config, dtype tensor.Dtype, change string) [32]byte {
		w, err := LoadAs(random{c, rand.New(rand.NewPCG(1, 1))}, dtype)
		if err != nil {
			t.Fatal(err)
		}
		if change != "" {
			switch data := w.tensors[change].Data().(type) {
			case []float32:
				data[len(data)-1]++
			case []la.F16:
				data[0]++
			}
		}
		return w.Fingerprint()
	}
	add := func(what string, sum [32]byte) {
		if other, ok := sums[sum]; ok {
			t.Errorf("%s has the fingerprint of %s", what, other)
		}
		sums[sum] = what
	}
	c := small()
	for what, dtype := range map[string]tensor.Dtype{"as stored": {}, "f16": la.Float16, "bf16": la.BFloat16} {
		if of(c, dtype, "") != of(c, dtype, "") {
			t.Errorf("%s: two fingerprints", what)
		}
		add(what, of(c, dtype, ""))
	}
	for p := range c.Weights() {
		add(p.Name, of(c, tensor.Dtype{}, p.Name))
	}
	add("f16 with another embedding", of(c, la.Float16, "decoder.embed_tokens.weight"))
	c.DoLayerNormBefore, c.RemoveFinalLayerNorm = true, true
	add("another config", of(c, tensor.Dtype{}, ""))
}

// What the fingerprint reads of a weight is spread over all of it.
func TestSpread(t *testing.T) {
	for _, n := range []int{0, 1, 2, 4095, 4096, 4097, 5000, 8191, 8192, 100_003} {
		data := make([]int, n)
		for i := range data {
			data[i] = i
		}
		some, most := spread(data), (n+4094)/4095 // elements from one to the next
		if len(some) != min(n, 4096) || n > 0 && (some[0] != 0 || some[len(some)-1] != n-1) {
			t.Fatalf("%d elements of %d: %d to %d", len(some), n, some[0], some[len(some)-1])
		}
		for i := 1; i < len(some); i++ {
			if step := some[i] - some[i-1]; step < 1 || step > most {
				t.Fatalf("of %d: %d behind %d", n, some[i], some[i-1])
			}
		}
	}
	c := small()
	c.VocabSize = 700 // 4096 elements are the beginning of a table of tokens
	of := func(change int) [32]byte {
		w, err := Load(random{c, rand.New(rand.NewPCG(1, 1))})
		if err != nil {
			t.Fatal(err)
		}
		data := w.tensors["decoder.embed_tokens.weight"].Data().([]float32)
		if len(data) < 2*4096 {
			t.Fatalf("%d elements", len(data))
		}
		if change < 0 {
			data[len(data)+change]++
		}
		return w.Fingerprint()
	}
	if of(0) != of(0) || of(0) == of(-1) {
		t.Error("the last element of a large weight makes no difference")
	}
}
