package e2e

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// The functions and types below are exported for other commands, which measure whole decoders with them.

// wholeShapes maps the names of decoders to names in -shapes.
var wholeShapes = map[string]string{WholeOPT: longShape, WholePhi: phiShape}

// fixedSplits is the number of splits in FlashDecoding's schedule.
const fixedSplits = 8

// Whole is a decoder with random weights on the first GPU, and the same model in transformers.
type Whole struct {
	name   string
	shape  shape
	ours   decoder
	worker *measure.Worker // nil: no peers
	rounds int
	stderr io.Writer

	without []string // reasons why transformers are left out
	hello   string   // versions that transformers report
}

// Said returns the versions that transformers report, and the reasons why transformers were left out since
// the last call.
func (w *Whole) Said() (hello string, without []string) {
	without, w.without = w.without, nil
	return w.hello, without
}

// WholeTime is the time of one program for a prompt and for a step after the prompt, in seconds.
type WholeTime struct {
	Name         string
	Prompt, Step measure.Samples
}

// Names of programs.
const (
	WholeLean  = nameLean16
	WholeFixed = "lean, fixed split"
	WholeTorch = nameCompiled
)

// Names of decoders.
const (
	WholeOPT = "OPT-6.7b"
	WholePhi = "Phi-3-medium"
)

// WholePeers is the length of the longest prompt that transformers read. Transformers compile for each length.
const WholePeers = 8192

// OpenWhole makes a decoder of a shape for contexts of up to longest tokens.
func OpenWhole(shape string, longest int, python string, peers bool, rounds int, stderr io.Writer) (w *Whole, err error) {
	name, ok := wholeShapes[shape]
	if !ok {
		return nil, fmt.Errorf("no decoder is called %q", shape)
	}
	s, err := shapeNamed(name, longest)
	if err != nil {
		return nil, err
	}
	w = &Whole{name: shape, shape: s, rounds: rounds, stderr: stderr}
	fmt.Fprintf(stderr, "%s: making weights\n", shape)
	if w.ours, err = openGPU(s, 0); err != nil {
		return nil, err
	}
	if err := w.ours.check(); err != nil {
		return nil, errors.Join(err, w.ours.close())
	}
	if !peers {
		return w, nil
	}
	if w.worker, err = startDecoderWorker(python); err == nil {
		w.hello = strings.Join(w.worker.Hello, " ")
		err = makeTheirs(w.worker, s, "float16")
	}
	if err != nil {
		if w.worker != nil {
			err = errors.Join(err, w.worker.Close())
			w.worker = nil
		}
		w.leave(err)
	}
	return w, nil
}

// leave records why transformers are left out.
func (w *Whole) leave(err error) {
	reason, _, _ := strings.Cut(err.Error(), "\n") // stderr's last lines may follow
	w.without = append(w.without, strings.TrimSuffix(reason, ":"))
}

// theirs returns the worker that measures the prompt, or nil if there is none. It restarts a worker that has
// ended.
func (w *Whole) theirs(prompt int) *measure.Worker {
	if w.worker == nil || prompt > WholePeers {
		return nil
	}
	if !w.worker.Gone {
		return w.worker
	}
	fmt.Fprintf(w.stderr, "%s: transformers have ended, and are started again\n", w.name)
	again, err := w.worker.Again()
	if err == nil {
		if err = makeTheirs(again, w.shape, "float16"); err == nil {
			w.worker = again
			return again
		}
		err = errors.Join(err, again.Close())
	}
	w.leave(fmt.Errorf("%d tokens: %w", prompt, err))
	return nil
}

// theirError is an error of transformers. The measurement continues without transformers.
type theirError struct{ error }

func (e theirError) Unwrap() error { return e.error }

// Close closes the decoder and the worker.
func (w *Whole) Close() error {
	err := w.ours.close()
	if w.worker != nil {
		err = errors.Join(err, w.worker.Close())
	}
	return err
}

// stepsOf returns the number of steps per turn for the given number of tokens.
func stepsOf(tokens int) int { return min(tokens, 32) }

// Measure measures a prompt, and decode steps at the middle of the following tokens. The time of a step grows
// linearly with the context, so the time at the middle is the mean of all steps. If transformers fail,
// Measure measures without transformers.
func (w *Whole) Measure(prompt, tokens int) ([]WholeTime, error) {
	all, err := w.measure(prompt, tokens, w.theirs(prompt))
	if why := new(theirError); errors.As(err, why) {
		w.leave(fmt.Errorf("%d tokens: %w", prompt, why))
		all, err = w.measure(prompt, tokens, nil)
	}
	return all, err
}

// measure is Measure with the given worker, or without transformers if worker is nil.
func (w *Whole) measure(prompt, tokens int, worker *measure.Worker) ([]WholeTime, error) {
	prompts, err := w.prompts(prompt, worker)
	if err != nil {
		return nil, err
	}
	all, err := w.steps(prompt, tokens, worker)
	if err != nil {
		return nil, err
	}
	for i := range all {
		name := all[i].Name
		if name == WholeFixed {
			name = WholeLean // both schedules read prompts in the same way
		}
		all[i].Prompt = prompts[name]
	}
	return all, nil
}

// prompts measures the prompt with leanattention and transformers in alternation, after a warm-up.
func (w *Whole) prompts(prompt int, worker *measure.Worker) (_ map[string]measure.Samples, err error) {
	r := w.ours.reading(true)
	defer func() { err = errors.Join(err, r.close()) }()
	contenders := []measure.Contender{w.reader(WholeLean, func() (time.Duration, error) { return r.read(1, prompt) })}
	if worker != nil {
		contenders = append(contenders, w.reader(WholeTorch, func() (time.Duration, error) { return seconds(worker, "prompt 1 %d", prompt) }))
	}
	all, err := measure.Alternate(measure.Pace{Rounds: w.rounds, Steps: 1}, contenders)
	if err != nil {
		return nil, err
	}
	times := make(map[string]measure.Samples)
	for i, c := range contenders {
		times[c.Name] = all[i]
	}
	return times, nil
}

// seconds returns the time that transformers report for a question.
func seconds(worker *measure.Worker, question string, args ...any) (time.Duration, error) {
	t, _, err := worker.Seconds(1, question, args...)
	if err != nil {
		return 0, theirError{err}
	}
	return t[0], nil
}

func (w *Whole) reader(name string, read func() (time.Duration, error)) measure.Contender {
	return measure.Contender{Name: name, Run: func(n int) (total time.Duration, err error) {
		for range n {
			t, err := read()
			if err != nil {
				return 0, err
			}
			total += t
		}
		return total, nil
	}}
}

// steps measures decode steps in alternation: leanattention, leanattention with FlashDecoding's schedule, and
// transformers.
func (w *Whole) steps(prompt, tokens int, worker *measure.Worker) (_ []WholeTime, err error) {
	context, steps := prompt+tokens/2, stepsOf(tokens)
	fixed := w.ours.fixedSplit()
	defer func() { err = errors.Join(err, fixed.close()) }()
	var contenders []measure.Contender
	for _, e := range []struct {
		name string
		engine
	}{{WholeLean, w.ours}, {WholeFixed, fixed}} {
		contenders = append(contenders, measure.Contender{Name: e.name, Run: func(n int) (time.Duration, error) {
			_, steady, _, err := e.decode(1, context, n)
			return steady, err
		}})
	}
	if worker != nil {
		if _, err := worker.Ask("forget"); err != nil {
			return nil, theirError{err}
		}
		fmt.Fprintf(w.stderr, "%s, %d tokens: %s gets ready\n", w.name, context, nameCompiled)
		if _, err := worker.Ask("read compiled 1 %d %d", context, steps); err != nil {
			return nil, theirError{err}
		}
		contenders = append(contenders, measure.Contender{Name: WholeTorch, Run: func(n int) (time.Duration, error) { return seconds(worker, "run compiled %d", n) }})
	}
	all, err := measure.Alternate(measure.Pace{Rounds: w.rounds, Steps: steps}, contenders)
	if err != nil {
		return nil, err
	}
	var times []WholeTime
	for i, c := range contenders {
		times = append(times, WholeTime{Name: c.Name, Step: all[i]})
	}
	return times, nil
}
