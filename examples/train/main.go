// Command train trains a model of one decoder layer on a small text, by a graph that is written by hand: model.go. The command
// trains twice from the same seed: with attention made of Gorgonia's own ops (default), and with leanattention's node (lean).
// The losses are equal, and the memory is not.
//
//	go run ./examples/train -steps 300
//
// The command prints the losses of both, and then the bytes that a step of each allocates at growing contexts, as the runtime
// counts them. The program is short enough to be copied.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"runtime"
	"time"

	la "gorgonia.org/leanattention"
)

// trained is the size of the trained model. contexts are the contexts whose memory is measured, with the same model and one
// sequence.
var (
	trained  = size{batch: 8, context: 64, heads: 4, dim: 64, hidden: 128}
	contexts = []int{128, 256, 512, 1024}
)

func main() {
	steps := flag.Int("steps", 300, "training `steps`, at least 1")
	seed := flag.Uint64("seed", 1, "`number` that chooses the weights and the pieces of the text")
	flag.Parse()
	if *steps < 1 || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "-steps is %d, and must be at least 1; the arguments are %q, and must be none\n", *steps, flag.Args())
		os.Exit(2)
	}
	if err := run(*steps, *seed, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run trains with both attentions, and writes what they need.
func run(steps int, seed uint64, out io.Writer) error {
	stock, err := train(la.Default, steps, seed)
	if err != nil {
		return err
	}
	lean, err := train(la.Attention, steps, seed)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "loss, nats a character\n  step   default      lean\n")
	most := 0.0
	for i, loss := range stock.losses {
		most = max(most, math.Abs(loss-lean.losses[i]))
		if i%10 == 0 || i == steps-1 {
			fmt.Fprintf(out, "%6d%10.4f%10.4f\n", i+1, loss, lean.losses[i])
		}
	}
	fmt.Fprintf(out, "    ms%10.1f%10.1f  a step\n", stock.milliseconds, lean.milliseconds)
	fmt.Fprintf(out, "the losses differ by %.2g at most\n", most)

	fmt.Fprintf(out, "\nmemory, MiB that a step allocates\ncontext   default      lean\n")
	for _, n := range contexts {
		a, err := memory(la.Default, n)
		if err != nil {
			return err
		}
		b, err := memory(la.Attention, n)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%7d%10.1f%10.1f\n", n, a, b)
	}
	return nil
}

// course is the course of a training.
type course struct {
	losses       []float64 // of each step
	milliseconds float64   // of a step, on average
}

// train trains a new model.
func train(attend attention, steps int, seed uint64) (c course, err error) {
	m, err := newModel(attend, trained, seed)
	if err != nil {
		return c, err
	}
	defer m.close()
	begin := time.Now()
	for range steps {
		loss, err := m.step()
		if err != nil {
			return c, err
		}
		c.losses = append(c.losses, loss)
	}
	c.milliseconds = time.Since(begin).Seconds() * 1e3 / float64(steps)
	return c, nil
}

// memory returns the MiB that a training step with one sequence of context tokens allocates.
func memory(attend attention, context int) (float64, error) {
	s := trained
	s.batch, s.context = 1, context
	m, err := newModel(attend, s, 1)
	if err != nil {
		return 0, err
	}
	defer m.close()
	if _, err := m.step(); err != nil { // the first step also allocates what all steps share
		return 0, err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := m.step(); err != nil {
		return 0, err
	}
	runtime.ReadMemStats(&after)
	return float64(after.TotalAlloc-before.TotalAlloc) / (1 << 20), nil
}
