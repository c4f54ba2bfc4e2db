package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// The test's own program is the worker that it talks to.
const fakeVariable = "LEANBENCH_FAKE_WORKER"

func TestMain(m *testing.M) {
	if how := os.Getenv(fakeVariable); how != "" {
		fakeWorker(how)
		return
	}
	os.Exit(m.Run())
}

// fakeWorker answers with fixed times: a step takes a millisecond, and one of
// the packed way half of that.
func fakeWorker(how string) {
	if how == "broken" {
		fmt.Fprintln(os.Stderr, "cannot import torch")
		os.Exit(3)
	}
	fmt.Println("ok Fake 1.0")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		steps := 0
		fmt.Sscan(words[len(words)-1], &steps)
		switch words[0] {
		case "arena":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok")
		case "shape":
			fmt.Fprintln(os.Stderr, in.Text())
			switch {
			case how == "gpu-strange":
				fmt.Println("ok magic")
			case how == "gpu-refuses":
				fmt.Println("error out of memory")
			case strings.HasPrefix(how, "gpu"):
				fmt.Println("ok flash flashinfer without cudnn: too old")
			default:
				fmt.Println("ok")
			}
		case "model", "forget":
			fmt.Fprintln(os.Stderr, in.Text())
			fmt.Println("ok")
		case "read":
			fmt.Fprintln(os.Stderr, in.Text())
			switch compiled := words[1] == "compiled"; {
			case compiled && how == "opt-skips":
				fmt.Println("ok 3 CUDA graphs were skipped")
			case compiled && how == "opt-refuses":
				fmt.Println("error no memory")
			default:
				fmt.Println("ok")
			}
		case "run":
			if strings.HasPrefix(how, "opt") {
				each, text := 4e-3, "7 8 9"
				if words[1] == "eager" {
					each = 40e-3
				}
				if words[1] == "eager" && how == "opt-differs" {
					text = "1 2 3"
				}
				fmt.Println("ok", float64(steps)*each, text)
				continue
			}
			if strings.HasPrefix(how, "gpu") {
				time := map[string]string{"gpu-none": " 0"}[how]
				if time == "" {
					time = " 1e-3"
				}
				if how == "gpu-few" {
					steps--
				}
				fmt.Println("ok" + strings.Repeat(time, steps))
				continue
			}
			each := 1e-3
			if words[1] == "packed" {
				each /= 2
			}
			fmt.Println("ok", float64(steps)*each)
		case "decode":
			fmt.Println("ok", 0.5, float64(steps)*1e-3, 7, 8, 9)
		case "refuse":
			fmt.Println("error no such shape")
		case "chat":
			fmt.Println("well ...")
		case "die":
			fmt.Fprintln(os.Stderr, "out of memory")
			os.Exit(4)
		}
	}
}

func startFake(t *testing.T, how string) (*worker, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self)
	c.Env = append(os.Environ(), fakeVariable+"="+how)
	return start(c)
}

func TestWorker(t *testing.T) {
	w, err := startFake(t, "well")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(w.hello, " "); got != "Fake 1.0" {
		t.Errorf("hello %q", got)
	}
	if words, err := w.ask("shape %d", 3); err != nil || len(words) != 0 {
		t.Errorf("answer %q (%v)", words, err)
	}
	times, rest, err := w.seconds(2, "decode 1 2 %d", 4)
	if err != nil || times[0] != 500*time.Millisecond || times[1] != 4*time.Millisecond || strings.Join(rest, " ") != "7 8 9" {
		t.Errorf("times %v, rest %q (%v)", times, rest, err)
	}
	for question, want := range map[string]string{
		"refuse it": `"refuse it": the worker says "error no such shape"`,
		"chat":      `the worker says "well ..."`,
	} {
		if _, err := w.ask("%s", question); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", question, err)
		}
	}
	if _, _, err := w.seconds(1, "shape"); err == nil {
		t.Error("an answer without a time is one")
	}
	if _, _, err := w.seconds(3, "decode 1 2 3"); err != nil {
		t.Error(err)
	}
	if _, err := w.ask("die"); err == nil || !strings.Contains(err.Error(), "has ended:") || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("after its end: %v", err)
	}
	if _, err := w.ask("run sdpa 1"); err == nil {
		t.Error("a dead worker answers")
	}
	if err := w.close(); err == nil || !strings.Contains(err.Error(), "exit status 4") {
		t.Errorf("close: %v", err)
	}

	if w, err = startFake(t, "well"); err != nil {
		t.Fatal(err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
	if _, err := startFake(t, "broken"); err == nil || !strings.Contains(err.Error(), "cannot import torch") {
		t.Errorf("broken: %v", err)
	}
	if _, err := startWorker("/no/such/python", attentionWorker); err == nil {
		t.Error("a python that is not there started")
	}
}

// TestMeasurePeer: PyTorch's times become its speed and our ratio to it.
func TestMeasurePeer(t *testing.T) {
	w, err := startFake(t, "well")
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	b, _ := testBench(t)
	for _, kvHeads := range []int{4, 2} {
		shape := decodeShape{heads: 4, kvHeads: kvHeads, keys: 100, dim: 16, storage: storeF16}
		if err := b.measurePeer(w, one{table: tableTorch, shape: shape, inCache: true, faster: atLeast(1e-9)}); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("shape 4 %d 100 16 f16 1", kvHeads); !strings.Contains(w.stderr.text(), want) {
			t.Errorf("the worker was not asked for %q:%s", want, w.stderr.text())
		}
		is := shape.String() + ", in cache"
		if f := find(t, b.report, is, "PyTorch", speed); f == nil || !near(f.Value, float64(shape.bytes())/1e-3/1e9) {
			t.Errorf("PyTorch: %+v", f)
		}
		packed := find(t, b.report, is, "PyTorch, groups packed by hand", speed)
		if (packed != nil) != (kvHeads == 2) || packed != nil && !near(packed.Value, float64(shape.bytes())/5e-4/1e9) {
			t.Errorf("PyTorch, packed: %+v", packed)
		}
		f, ours := find(t, b.report, is, "lean, Attend", overTorch), find(t, b.report, is, "lean, Attend", speed)
		// Of two rounds the median is the mean: of our speed, and of our time.
		if f == nil || f.Bar == nil || !f.Bar.Met || f.Value < ours.Value*1e9/float64(shape.bytes())*1e-3*0.999 {
			t.Errorf("%+v, and we have %+v", f, ours)
		}
	}
}
