package decoder

import (
	"bytes"
	"cmp"
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
)

// TestSavedGolden: texts of all families go on from a saved beginning as transformers continue them, and a full context is
// shifted as by a fresh text.
func TestSavedGolden(t *testing.T) { testSavedGolden(t, nil, nil) }

// TestGPUSavedGolden: the same from a GPU's cache to host memory, and back.
func TestGPUSavedGolden(t *testing.T) {
	gpu := devicetest.Open(t)
	t.Run("from the GPU", func(t *testing.T) { testSavedGolden(t, gpu, nil) })
	t.Run("to the GPU", func(t *testing.T) { testSavedGolden(t, nil, gpu) })
}

func testSavedGolden(t *testing.T, from, to *device.GPU) {
	models := goldenOn(t, cmp.Or(from, to))
	onGPU, before, after := from != nil || to != nil, 60, 40
	if onGPU && testing.Short() { // an emulated GPU is slow
		models, before, after = models[:2], 3, 2
	}
	for _, m := range models {
		t.Run(m.Name, func(t *testing.T) {
			first := goldenEngine(t, &m, Options{Context: 256, Batch: 1, Device: from})
			prompt := m.Prompts[0]
			if got := alone(t, first, Request{Prompt: prompt, Tokens: before}); !slices.Equal(got, m.Next[:before]) {
				t.Fatalf("continued with %v, want %v", got, m.Next[:before])
			}
			text := slices.Concat(prompt, m.Next[:before])
			file := save(t, first, text, len(text)-1) // the last token was not read
			second := goldenEngine(t, &m, Options{Context: 256, Batch: 2, Device: to})
			if _, err := second.Load(bytes.NewReader(file)); err != nil {
				t.Fatal(err)
			}
			if got := alone(t, second, Request{Prompt: text, Tokens: after}); !slices.Equal(got, m.Next[before:before+after]) {
				t.Errorf("continued with %v, want %v", got, m.Next[before:before+after])
			}
			if st := second.Stats(); st.SharedTokens != len(text)-1 || st.Rows != after {
				t.Errorf("%+v", st)
			}
			if onGPU {
				return
			}
			e := goldenEngine(t, &m, Options{Context: 40, Batch: 1})
			r := Request{Prompt: prompt[:min(30, len(prompt))], Tokens: 80, Shift: true, Keep: 4}
			want, dropped := shifted(t, e, r)
			if got := alone(t, e, r); !slices.Equal(got, want) || dropped < 40 {
				t.Errorf("shifted: %v, want %v", got, want)
			}
		})
	}
}
