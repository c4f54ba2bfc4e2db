// Command train trains a model of one decoder layer on a small text, by a graph that is written by hand: model.go. The command
// trains twice from the same seed: with attention made of Gorgonia's own ops (default), and with leanattention's node (lean).
// The losses are equal, and the memory is not.
//
//	go run ./examples/train -steps 300
//
// The command prints the losses of both, and then the bytes that a step of each allocates at growing contexts, as the runtime
// counts them. With a GPU, it trains a larger model instead, in host memory and on the GPU, and prints the losses of both:
//
//	go run ./examples/train -device gpu
//
// On a GPU, attention has 16 bits, since its gradients have, and all else has 32. So the losses differ a little. The program is short
// enough to be copied.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"runtime"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
)

// trained is the size of the trained model. contexts are the contexts whose memory is measured, with the same model and one
// sequence. onGPU is the size of the model that is trained on a GPU, where heads have at least 64 elements.
var (
	trained  = size{batch: 8, context: 64, heads: 4, dim: 64, hidden: 128}
	onGPU    = size{batch: 8, context: 64, heads: 2, dim: 128, hidden: 256}
	contexts = []int{128, 256, 512, 1024}
)

func main() {
	steps := flag.Int("steps", 300, "training `steps`, at least 1")
	seed := flag.Uint64("seed", 1, "`number` that chooses the weights and the pieces of the text")
	where := flag.String("device", "cpu", "`where` to train: cpu, or gpu, which is compared with cpu")
	flag.Parse()
	if *steps < 1 || *where != "cpu" && *where != "gpu" || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "-steps is %d, and must be at least 1; -device is %q, and must be cpu or gpu; the arguments are %q, and must be none\n", *steps, *where, flag.Args())
		os.Exit(2)
	}
	train := run
	if *where == "gpu" {
		train = runOnGPU
	}
	if err := train(*steps, *seed, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run trains with both attentions, and writes what they need.
func run(steps int, seed uint64, out io.Writer) error {
	stock, err := train(kind{attend: la.Default}, trained, steps, seed)
	if err != nil {
		return err
	}
	lean, err := train(kind{attend: la.Attention}, trained, steps, seed)
	if err != nil {
		return err
	}
	compare(out, [2]string{"default", "lean"}, [2]course{stock, lean})

	fmt.Fprintf(out, "\nmemory, MiB that a step allocates\ncontext   default      lean\n")
	for _, n := range contexts {
		a, err := memory(kind{attend: la.Default}, n)
		if err != nil {
			return err
		}
		b, err := memory(kind{attend: la.Attention}, n)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%7d%10.1f%10.1f\n", n, a, b)
	}
	return nil
}

// runOnGPU trains in host memory and on a GPU, and writes the losses.
func runOnGPU(steps int, seed uint64, out io.Writer) (err error) {
	gpu, err := device.Open(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gpu.Close()) }()
	here, err := train(kind{attend: la.Attention}, onGPU, steps, seed)
	if err != nil {
		return err
	}
	there, err := train(kind{attend: half, gpu: gpu}, onGPU, steps, seed)
	if err != nil {
		return err
	}
	compare(out, [2]string{"cpu", "gpu"}, [2]course{here, there})
	return nil
}

// compare writes the losses of two courses.
func compare(out io.Writer, names [2]string, courses [2]course) {
	fmt.Fprintf(out, "loss, nats a character\n  step%10s%10s\n", names[0], names[1])
	a, b, most := courses[0], courses[1], 0.0
	for i, loss := range a.losses {
		most = max(most, math.Abs(loss-b.losses[i]))
		if i%10 == 0 || i == len(a.losses)-1 {
			fmt.Fprintf(out, "%6d%10.4f%10.4f\n", i+1, loss, b.losses[i])
		}
	}
	fmt.Fprintf(out, "    ms%10.1f%10.1f  a step\n", a.milliseconds, b.milliseconds)
	fmt.Fprintf(out, "the losses differ by %.2g at most\n", most)
}

// course is the course of a training.
type course struct {
	losses       []float64 // of each step
	milliseconds float64   // of a step, on average
}

// train trains a new model.
func train(k kind, s size, steps int, seed uint64) (c course, err error) {
	m, err := newModel(k, s, seed)
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
func memory(k kind, context int) (float64, error) {
	s := trained
	s.batch, s.context = 1, context
	m, err := newModel(k, s, 1)
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
