//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package e2e

import (
	"io"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/emulated/system"
)

// TestEmulatedModelScaling: steps of a small model have a row for each number of GPUs, and the same tokens. What there
// are no kernels for is left out.
func TestEmulatedModelScaling(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	var gpus []*la.GPU
	for _, ordinals := range [][]int{{0}, {0, 1}, {0, 1, 2}} {
		g, err := la.OpenGPUs(ordinals...)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		gpus = append(gpus, g)
	}
	config := optShape(1, 128, 2)
	config.VocabSize, config.FFNDim, config.MaxPositions = 70, 96, 12
	m := modelScaling{"tiny", config, 2, []modelCase{{batch: 2, context: 5, two: 1e9}, {batch: 1, context: 7}, {batch: 2, context: 5, prompt: true}}, false}
	var errs strings.Builder
	x := &gpu.Scaled{Report: &measure.Report{}, GPUs: gpus, Rounds: 1, Match: func(is string) bool { return strings.Contains(is, "b2") }, Stdout: io.Discard, Stderr: &errs}
	if err := m.measure(x); err != nil {
		t.Fatal(err)
	}
	is := m.name(m.cases[0])
	over := x.Report.Find(is, "2 GPUs", measure.OverOneGPU)
	if len(x.Report.Figures) != 10 || x.Report.Find(is, "one GPU", measure.StepMillis) == nil || x.Report.Find(m.name(m.cases[2]), "3 GPUs", measure.PromptMillis) == nil || over == nil || over.Bar == nil || over.Bar.Met {
		t.Errorf("%+v", x.Report.Figures)
	}
	if text := errs.String(); strings.Contains(text, "left out") || strings.Contains(text, "other tokens") {
		t.Error(text)
	}
	errs.Reset()
	m.config.HiddenSize, m.config.WordEmbedProjDim = 80, 80 // heads of 40
	if err := m.measure(x); err != nil {
		t.Fatal(err)
	}
	if text := errs.String(); !strings.Contains(text, "one GPU: left out: ") || !strings.Contains(text, "3 GPUs: left out: ") || len(x.Report.Figures) != 10 {
		t.Errorf("%d figures, %s", len(x.Report.Figures), text)
	}
}
