package decoder

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUFewBits: with weights of 8 and 4 bits, a GPU has the logits of the CPU: of matrices that are rounded, and of a GGUF file, whose
// matrices have seven types. Matrices of folders by GPTQ, by AWQ and in FP8 stay as they are.
func TestGPUFewBits(t *testing.T) {
	gpu := devicetest.Open(t)
	o := Options{Device: gpu, Exact: true, Cache: la.Float16}
	tiny := openCheckpoint(t, "../tiny")
	for _, as := range []tensor.Dtype{tensor.Int8, la.E4M3, nn.Int4} {
		t.Run(as.Name(), func(t *testing.T) {
			o := o
			o.Weights = as
			stepsAgainstCPU(t, tiny.Engine, o, 2, 2, 0.003)
		})
	}
	t.Run("GGUF", func(t *testing.T) {
		m := withoutTokenizer(t, writeBlocksOf(t, rand.New(rand.NewPCG(1, 2)), true, 4, 2, 1))
		defer m.Close()
		few := map[string]int{}
		stepsAgainstCPU(t, func(o Options) (*Engine, error) {
			e, err := m.Engine(o)
			if err == nil && o.Device != nil {
				for w := range m.network.Weights() {
					if v := e.weights[w.Name]; w.matrix() {
						few[fmt.Sprint(v.(interface{ Dtype() tensor.Dtype }).Dtype().Name())]++
					}
				}
			}
			return e, err
		}, o, 2, 2, 0.01)
		for _, of := range []string{"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"} {
			if few[of] == 0 {
				t.Errorf("no matrix is of %s: %v", of, few)
			}
		}
		if few["Float16"] > 0 {
			t.Errorf("matrices became float16: %v", few)
		}
	})
	for _, name := range []string{"awq", "awq_128", "gptq_order", "gptq_8", "fp8_block", "fp8_channel"} { // whose heads no GPU takes
		t.Run(name, func(t *testing.T) {
			m, err := readPacked(t, name).open(t)
			if err != nil {
				t.Fatal(err)
			}
			here, _, err := load(m.network, m.files, placement{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			there, free, err := load(m.network, m.files, placement{gpu: gpu}, nil)
			if err != nil {
				t.Fatal(err)
			}
			few := 0
			for name, v := range here {
				if _, dense := v.(*tensor.Dense); !dense {
					few++
				}
				if got := there[name]; got.Dtype() != v.Dtype() || fmt.Sprint(got.Shape()) != fmt.Sprint(v.Shape()) {
					t.Errorf("%s is %v on the GPU, and %v", name, got, v)
				}
			}
			if few == 0 {
				t.Error("no matrix has few bits")
			}
			if err := free(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestGPUsFewBits: several GPUs have the logits of the CPU with rounded weights, and with weights of a GGUF file, of which columns
// that do not divide into whole blocks are float16.
func TestGPUsFewBits(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	o := Options{Device: gpus, Exact: true, Cache: la.Float16}
	tiny := openCheckpoint(t, "../tiny")
	types := []tensor.Dtype{nn.Int4}
	if reftest.Every(t) {
		types = append(types, tensor.Int8, la.E4M3)
	}
	for _, as := range types {
		o := o
		o.Weights = as
		stepsAgainstCPU(t, tiny.Engine, o, 2, 2, 0.003)
	}
	m := withoutTokenizer(t, writeBlocksOf(t, rand.New(rand.NewPCG(1, 2)), true, 4, 2, 1))
	defer m.Close()
	few, wide := 0, 0
	stepsAgainstCPU(t, func(o Options) (*Engine, error) {
		e, err := m.Engine(o)
		if err == nil && o.Device != nil {
			for w := range m.network.Weights() {
				switch of := e.weights[w.Name].(interface{ Dtype() tensor.Dtype }).Dtype(); {
				case !w.matrix():
				case of == la.Float16 && w.Split.Axis == ByColumns:
					wide++
				case strings.HasPrefix(of.Name(), "Q"):
					few++
				default:
					t.Errorf("%s is of %v", w.Name, of)
				}
			}
		}
		return e, err
	}, o, 2, 2, 0.01)
	if few < 7 || few+wide != 9 {
		t.Errorf("%d matrices are in blocks, and %d are float16", few, wide)
	}
}

// TestGPUFewBitsSteps: steps of one and two texts with weights of 8 and 4 bits, which are one launch of each GPU of 9.0, have the logits
// of the CPU.
func TestGPUFewBitsSteps(t *testing.T) {
	n, err := ReadNetwork([]byte(`{"model_type":"llama","vocab_size":50,"hidden_size":256,"intermediate_size":512,"num_hidden_layers":2,
		"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"rms_norm_eps":1e-5,"rope_theta":10000}`), 64)
	if err != nil {
		t.Fatal(err)
	}
	make := func(o Options) (*Engine, error) { return NewEngine(n, fanWeights{}, o) }
	for i, c := range []struct {
		gpus, texts int
		weights, kv tensor.Dtype
	}{
		{1, 2, nn.Int4, la.Float16}, {2, 1, nn.Int4, la.Float16}, {1, 1, tensor.Int8, la.BFloat16}, {1, 1, la.E4M3, la.Float16}, {2, 2, tensor.Int8, la.Float16},
	} {
		if testing.Short() && i > 2 {
			break // an emulated GPU is slow
		}
		t.Run(fmt.Sprint(c.gpus, c.texts, c.weights, c.kv), func(t *testing.T) {
			lib := system.Emulate(t)
			if lib != nil && lib.State().Major != 9 {
				t.Skip("an emulated GPU of 9.0 alone: LEANATTENTION_PTX")
			}
			gpu, err := device.Open([]int{0, 1}[:c.gpus]...)
			if errors.Is(err, la.ErrNoDevice) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer gpu.Close()
			stepsAgainstCPU(t, make, Options{Device: gpu, Exact: true, Weights: c.weights, Cache: c.kv}, c.texts, 3, 0.003)
			if lib == nil {
				return
			}
			if n := strings.Count(lib.Log(), "kernel megakernel_packed_llama_"); n != c.gpus {
				t.Errorf("%d launches of whole steps were recorded, want %d", n, c.gpus)
			}
		})
	}
}

// TestQuantisedColumns: columns of a matrix in blocks or groups have the numbers of the whole.
func TestQuantisedColumns(t *testing.T) {
	m := withoutTokenizer(t, writeBlocks(t, rand.New(rand.NewPCG(1, 2)), false))
	defer m.Close()
	for w := range m.network.Weights() {
		if !w.matrix() || w.Split.Axis != ByColumns {
			continue
		}
		name, shape := w.tensor()
		q, err := m.files.blocks(name, shape, 0, w.Shape[0])
		if err != nil {
			t.Fatal(err)
		}
		whole := make([]float32, w.Shape[0]*w.Shape[1])
		if err := m.files.float32s(whole, name, shape, 0, w.Shape[0]); err != nil {
			t.Fatal(err)
		}
		block := blockElements(q.Format)
		for _, c := range [][2]int{{0, w.Shape[1]}, {block, w.Shape[1]}, {0, block}, {1, w.Shape[1]}, {0, block - 1}} {
			left, right := c[0], c[1]
			part := quantisedColumns(q, left, right)
			if left%block != 0 || right%block != 0 {
				if part != nil {
					t.Errorf("%s of %s: columns %v of blocks of %d", w.Name, q.Format, c, block)
				}
				continue
			}
			if right <= left {
				continue
			}
			v, err := part.Value()
			if err != nil {
				t.Fatal(err)
			}
			g := G.NewGraph()
			of := G.NewTensor(g, v.(interface{ Dtype() tensor.Dtype }).Dtype(), 2, G.WithShape(v.Shape()...), G.WithName("w"), G.WithValue(v))
			ids := tensor.New(tensor.WithBacking([]int{w.Shape[0] - 1, 0}))
			y := G.Must(nn.Embedding(of, G.NodeFromAny(g, ids, G.WithName("ids")), nil))
			vm := G.NewTapeMachine(g)
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			got := y.Value().Data().([]float32)[:right-left]
			if want := whole[len(whole)-w.Shape[1]:][left:right]; !slices.Equal(got, want) {
				t.Errorf("%s of %s, columns %v: %v, want %v", w.Name, q.Format, c, got[:4], want[:4])
			}
			vm.Close()
		}
	}
	q := &nn.Quantised{Format: "e4m3", Rows: 2, Columns: 300, Data: make([]byte, 600), Scales: []float32{1, 2, 3, 4, 5, 6}, Group: 128}
	for i := range q.Data {
		q.Data[i] = byte(i % 120)
	}
	part := quantisedColumns(q, 128, 300)
	if part == nil || !slices.Equal(part.Scales, []float32{2, 3, 5, 6}) || part.Columns != 172 || !slices.Equal(part.Data[:172], q.Data[128:300]) || !slices.Equal(part.Data[172:], q.Data[428:]) {
		t.Errorf("groups: %+v", part)
	}
	if quantisedColumns(q, 128, 299) != nil || quantisedColumns(q, 64, 300) != nil {
		t.Error("columns with a part of a group")
	}
	q.Scales, q.Group = []float32{1, 2}, 0
	if part := quantisedColumns(q, 3, 7); part == nil || !slices.Equal(part.Scales, q.Scales) || !slices.Equal(part.Data, []byte{3, 4, 5, 6, 63, 64, 65, 66}) {
		t.Errorf("scales of rows: %+v", part)
	}
}
