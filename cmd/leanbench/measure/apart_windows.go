package measure

import (
	"os/exec"
	"syscall"
)

// apart has a process be the first of a group of its own. A console's Ctrl+C is for all of our group.
func apart(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = new(syscall.SysProcAttr)
	}
	c.SysProcAttr.CreationFlags |= syscall.CREATE_NEW_PROCESS_GROUP
}
