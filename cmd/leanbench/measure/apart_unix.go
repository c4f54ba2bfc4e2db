//go:build unix

package measure

import (
	"os/exec"
	"syscall"
)

// apart puts the process into a process group of its own. An interrupt of the terminal, or a signal of
// timeout(1), reaches leanbench's group only.
func apart(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = new(syscall.SysProcAttr)
	}
	c.SysProcAttr.Setpgid = true
}
