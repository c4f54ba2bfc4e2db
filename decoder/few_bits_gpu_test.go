package decoder

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/nn"

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

// TestGPUsFewBits: several GPUs refuse to round weights to fewer than 16 bits, and compute with those of a file as float16.
func TestGPUsFewBits(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	_, err := NewEngine(smallNetwork(), noWeights{t}, Options{Weights: tensor.Int8, Device: gpus})
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "weights of 8 and 4 bits are on the CPU or one GPU") {
		t.Errorf("int8 on two GPUs: %v", err)
	}
	m := withoutTokenizer(t, writeBlocksOf(t, rand.New(rand.NewPCG(1, 2)), true, 4, 2, 1))
	defer m.Close()
	weights, free, err := load(m.network, m.files, placement{gpu: gpus}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range weights {
		if d, ok := v.(*device.Tensor); !ok || len(d.Shape()) == 2 && d.Dtype() != la.Float16 {
			t.Errorf("%s is %v", name, v)
		}
	}
	if err := free(); err != nil {
		t.Error(err)
	}
}
