package leanattention

import (
	"fmt"
	"runtime"
	"slices"

	"pgregory.net/rapid"
)

// Run does a whole step with Step.Run, whose function ends well or badly.
func (m *cacheModel) Run(t *rapid.T) {
	s := m.pickStep(t)
	var parts []modelPart
	var wrong []error
	if s.open || rapid.Bool().Draw(t, "anything") {
		parts, wrong = m.drawAnything(t, s)
	} else {
		parts = m.drawIdle(t, s)
	}
	appends, wrong := m.plan(t, parts, wrong)
	how := rapid.SampledFrom([]string{"well", "well", "error", "panic", "goexit", "a layer less"}).Draw(t, "how")
	called := false
	err, panicked, ended := outcome(func() error {
		return s.step.Run(appends, func() error {
			called = true
			m.opened(s, parts)
			return m.inRun(t, s, how)
		})
	})
	if panicked != nil && panicked != errFault { // of rapid
		panic(panicked)
	}
	switch {
	case wrong != nil:
		expect(t, err, wrong...)
		if called {
			t.Fatal("the function was called")
		}
		return
	case how == "well" || how == "a layer less" && len(parts) == 0:
		expect(t, err)
		m.committed(s)
		return
	case how == "error":
		expect(t, err, errFault)
	case how == "a layer less":
		expect(t, err, ErrState)
	case how == "panic" && panicked != errFault, how == "goexit" && !ended:
		t.Fatalf("%s: %v, %v, %t", how, err, panicked, ended)
	}
	m.rolledBack(s)
}

// inRun is the function of a Run.
func (m *cacheModel) inRun(t *rapid.T, s *modelStep, how string) error {
	for _, err := range []error{s.step.Commit(), s.step.Rollback(), s.step.Set(nil), s.step.Run(nil, func() error { return nil })} {
		expect(t, err, ErrState)
	}
	if how == "a layer less" {
		for l := range m.cache.config.Layers - 1 {
			m.runLayer(t, s, l)
		}
		return nil
	}
	m.runLayers(t, s)
	switch how {
	case "error":
		return fmt.Errorf("the model's: %w", errFault)
	case "panic":
		panic(errFault)
	case "goexit":
		runtime.Goexit()
	}
	return nil
}

// Step sees a step through: what a decoder does.
func (m *cacheModel) Step(t *rapid.T) {
	s := m.pickStep(t)
	if !s.open {
		m.setIdle(t, s)
	}
	if s.open { // the cache is not full
		m.runLayers(t, s)
		m.commit(t, s)
	}
}

// RunLayer runs one layer, any one and with new values each time.
func (m *cacheModel) RunLayer(t *rapid.T) {
	s := m.pickStep(t)
	m.runLayer(t, s, rapid.IntRange(0, m.cache.config.Layers-1).Draw(t, "layer"))
}

// RunLayers runs every layer, in any order.
func (m *cacheModel) RunLayers(t *rapid.T) { m.runLayers(t, m.pickStep(t)) }

func (m *cacheModel) runLayers(t *rapid.T, s *modelStep) {
	for _, l := range rapid.Permutation(indexes(m.cache.config.Layers)).Draw(t, "order") {
		m.runLayer(t, s, l)
	}
}

func (m *cacheModel) runLayer(t *rapid.T, s *modelStep, layer int) {
	in := s.draw(m.rng, layer, s.fresh())
	if !s.open {
		expect(t, s.runLayer(layer, in), ErrState)
		return
	}
	expect(t, s.runLayer(layer, in))
	m.ran(t, s, layer, in)
}

// ran checks a layer that has run.
func (m *cacheModel) ran(t *rapid.T, s *modelStep, layer int, in layerInput) {
	if s.lastRun[layer] { // a second time: this is another run
		clear(s.lastRun)
	}
	s.lastRun[layer] = true
	var parts []stepPart
	for _, p := range s.parts {
		parts = append(parts, stepPart{append(slices.Clone(p.tokens), p.fresh...), len(p.fresh), p.tree})
	}
	noError(t, s.checkLayer(layer, in.q, parts))
}

// RunGraph runs the graph on Gorgonia's machine, to its end or to a fault.
func (m *cacheModel) RunGraph(t *rapid.T) {
	s := m.pickStep(t)
	if !s.open {
		t.Skip("step is not open")
	}
	layers := m.cache.config.Layers
	end := layers
	if layers > 1 && rapid.Bool().Draw(t, "fails") {
		end = rapid.IntRange(1, layers-1).Draw(t, "fails before")
	}
	// Layers that the run does not reach keep what they have: their inputs go
	// to tokens that nobody looks at.
	var inputs []layerInput
	for l := range layers {
		tokens := s.fresh()
		if l >= end {
			tokens = newTestTokens(len(tokens), layers)
		}
		inputs = append(inputs, s.draw(m.rng, l, tokens))
	}
	var wrong []error
	if end < layers {
		wrong = append(wrong, errFault)
	}
	expect(t, s.run(inputs, end), wrong...)
	for l := range end {
		m.ran(t, s, l, inputs[l])
	}
}

func (m *cacheModel) Commit(t *rapid.T) { m.commit(t, m.pickStep(t)) }

func (m *cacheModel) commit(t *rapid.T, s *modelStep) {
	var wrong []error
	if !s.open || len(s.parts) > 0 && len(s.lastRun) < m.cache.config.Layers {
		wrong = append(wrong, ErrState)
	}
	if expect(t, s.step.Commit(), wrong...) {
		m.committed(s)
	}
}

func (m *cacheModel) committed(s *modelStep) {
	for _, p := range s.parts {
		p.tokens = append(slices.Clone(p.tokens), p.fresh...)
		p.pages, p.step = p.after, nil
		m.giveBack(p.modelSequence)
	}
	s.open, s.parts = false, nil
}

func (m *cacheModel) Rollback(t *rapid.T) {
	s := m.pickStep(t)
	expect(t, s.step.Rollback()) // on a step that is not open it does nothing
	m.rolledBack(s)
}

func (m *cacheModel) rolledBack(s *modelStep) {
	for _, p := range s.parts {
		p.step = nil
	}
	s.open, s.parts = false, nil
}
