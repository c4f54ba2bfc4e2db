//go:build unix

package measure

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// leaderVariable tells TestInterrupt that it is the program that is interrupted.
const leaderVariable = "LEANBENCH_INTERRUPTED"

// TestInterrupt: what a terminal, or timeout, sends to a whole group of processes ends no worker of a program that goes on.
func TestInterrupt(t *testing.T) {
	if os.Getenv(leaderVariable) != "" {
		beInterrupted(t)
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		c := exec.Command(self, "-test.run=^TestInterrupt$")
		c.Env = append(os.Environ(), leaderVariable+"=1")
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		stdout, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		var said []string
		for in := bufio.NewScanner(stdout); in.Scan(); {
			said = append(said, in.Text())
			if in.Text() == "ready" {
				if err := syscall.Kill(-c.Process.Pid, s); err != nil {
					t.Error(err)
				}
			}
		}
		if err := c.Wait(); err != nil || !strings.Contains(strings.Join(said, "\n"), "ready\nanswered\n") {
			t.Errorf("%v: %v: %q", s, err, said)
		}
	}
}

// beInterrupted asks a worker behind an interrupt.
func beInterrupted(t *testing.T) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	w, err := Start(measuretest.Command(t, "well"))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("ready")
	<-signals
	if _, err := w.Ask("shape 3"); err != nil {
		t.Fatal(err)
	}
	fmt.Println("answered")
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
